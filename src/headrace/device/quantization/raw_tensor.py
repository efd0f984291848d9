"""A tensor as it lies in a model file: quantised bits are kept, so that kernels can pack them without a detour.

Rows are independent in every format (a row is a whole number of quantisation groups), which is why taking and
permuting rows works on the packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from headrace.base.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format: ``block`` values take ``block_bytes`` bytes; ``decode`` maps ``[n, block_bytes]`` to float32.

    ``decode`` returns ``[n, block]``.
    """

    name: str
    block: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Bytes of one tensor.

    Attributes:
        name: the tensor's name in its file, for messages.
        shape: logical shape; the last dimension is contiguous and holds whole groups.
        format: how values are stored.
        data: uint8 ``[rows, row_bytes]`` with ``rows = prod(shape[:-1])``; often a view of a file mapping.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    data: np.ndarray

    def take_rows(self, index: slice | np.ndarray) -> RawTensor:
        """Rows of a 2-D tensor (values of a 1-D one), in the given order, without decoding."""
        if len(self.shape) == 1:
            assert self.format.block == 1
            values = self.data.reshape(self.shape[0], -1)[index]
            return RawTensor(self.name, (len(values),), self.format, values.reshape(1, -1))
        data = self.data[index]
        return RawTensor(self.name, (len(data), *self.shape[1:]), self.format, data)

    def take_cols(self, start: int, stop: int) -> RawTensor:
        """Columns ``start:stop`` of a 2-D tensor; both must lie on group borders.

        Raises:
            ModelFileError: a border cuts a quantisation group.
        """
        block, size = self.format.block, self.format.block_bytes
        if start % block or stop % block:
            raise ModelFileError(f"{self.name}: columns {start}:{stop} cut a {self.format.name} group of {block}")
        data = self.data[:, start // block * size : stop // block * size]
        return RawTensor(self.name, (self.shape[0], stop - start), self.format, data)

    def dequantize(self) -> np.ndarray:
        """The values as float32 of ``shape`` (a fresh array)."""
        blocks = np.ascontiguousarray(self.data).reshape(-1, self.format.block_bytes)
        return self.format.decode(blocks).reshape(self.shape)


def make_raw_float(name: str, values: np.ndarray) -> RawTensor:
    """Wrap a float32 array."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows = prod(values.shape[:-1]) if values.ndim > 1 else 1
    return RawTensor(name, values.shape, F32, values.view(np.uint8).reshape(rows, -1))


def _decode_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(np.float32).copy()


F32 = Format("F32", 1, 4, _decode_f32)
