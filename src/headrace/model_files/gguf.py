"""GGUF files, read without PyTorch and in a few tens of milliseconds.

Owns the format: header, metadata, tensor table, and the sizes of its block types. It does not know what a tensor means
or how to decode one. Every length is checked against the file before it is used, so that a truncated or broken file
ends in a `ModelFileError` that names the file and the place, never in a wrong tensor.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import ModelFileError
from headrace.model_files.source import MappedFile, TensorInfo

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20

# Storage types by number: name, values of a block, bytes of a block.
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


class _Cursor:
    """A place in the header, with checked reads. ``what`` is the key or tensor being read, for messages."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._limit = len(file)
        # The header lies at the front; slicing bytes beats slicing a mapping, and the whole file may be large.
        self._window = file.read(0, min(self._limit, 1 << 16))
        self.pos = 0
        self.what = "the header"

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: {problem} in {self.what}; the file is broken, fetch it again")

    def _need(self, nbytes: int) -> bytes:
        """Make the window reach ``nbytes`` past the position and return it."""
        end = self.pos + nbytes
        if end > self._limit:
            raise self.fail(f"the file ends at byte {self._limit}, but byte {end} is needed")
        if end > len(self._window):
            self._window = self._file.read(0, min(self._limit, max(end, 4 * len(self._window))))
        return self._window

    def scalar(self, fmt: str) -> Any:
        size = struct.calcsize(fmt)
        value = struct.unpack_from(fmt, self._need(size), self.pos)[0]
        self.pos += size
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        window = self._need(length)
        raw = window[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def texts(self, count: int) -> list[str]:
        """An array of strings: a tight loop, since vocabularies have 10⁵ of them."""
        self._need(8 * count)
        read_length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        result: list[str] = []
        append = result.append
        window, pos = self._window, self.pos
        for _ in range(count):
            if pos + 8 > len(window):
                self.pos = pos
                window = self._need(8)
            end = pos + 8 + read_length(window, pos)[0]
            if end > len(window):
                self.pos = pos
                window = self._need(end - pos)
            try:
                append(window[pos + 8 : end].decode())
            except UnicodeDecodeError:
                raise self.fail(f"string {len(result)} is not UTF-8") from None
            pos = end
        self.pos = pos
        return result

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_DTYPES[kind])
        window = self._need(dtype.itemsize * count)
        values: list[Any] = np.frombuffer(window, dtype=dtype, count=count, offset=self.pos).tolist()
        self.pos += dtype.itemsize * count
        return values

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 3:
            raise self.fail(f"value type {kind} is unknown")
        item_kind, count = self.scalar("<I"), self.scalar("<Q")
        if item_kind == _STRING:
            return self.texts(count)
        if item_kind in _DTYPES:
            return self.numbers(item_kind, count)
        if count > self._limit:
            raise self.fail(f"an array of {count} entries cannot fit")
        return [self.value(item_kind, depth + 1) for _ in range(count)]


class GGUFFile:
    """One open GGUF file.

    Attributes:
        metadata: key → number, bool, string or list.
        tensors: name → place; shapes are row-major (the file stores the contiguous dimension first).
    """

    def __init__(
        self, file: MappedFile, metadata: dict[str, Any], metadata_end: int, tensors: dict[str, TensorInfo]
    ) -> None:
        self._file = file
        self._metadata_end = metadata_end
        self.path = file.path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map the file and read its header.

        Raises:
            ModelFileError: missing, truncated, broken, of another version, or with an unknown tensor type.
        """
        file = MappedFile(Path(path))
        cursor = _Cursor(file)
        if file.read(0, 4) != _MAGIC:
            raise ModelFileError(f"{file.path}: not a GGUF file (it does not begin with 'GGUF')")
        cursor.pos = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            hint = " (big-endian file)" if version == 0x03000000 else ""
            raise ModelFileError(f"{file.path}: GGUF version {version}{hint} is not supported; supported: 2, 3")
        num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            cursor.what = f"metadata entry {index}"
            key = cursor.text()
            cursor.what = f"metadata '{key}'"
            if key in metadata:
                raise cursor.fail("a second value")
            metadata[key] = cursor.value(cursor.scalar("<I"))
        metadata_end = cursor.pos
        if (parts := metadata.get("split.count", 0)) not in (0, 1):
            raise ModelFileError(f"{file.path}: is one of {parts} parts; join the parts to one file first")
        return cls(file, metadata, metadata_end, _read_tensors(cursor, file, num_tensors, metadata))

    def metadata_key(self) -> str:
        """SHA-256 over the metadata as it lies in the file: the name of whatever is derived from it."""
        return hashlib.sha256(self._file.read(0, self._metadata_end)).hexdigest()

    def names(self) -> list[str]:
        """Every tensor of the file."""
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Place of a tensor; raises `ModelFileError` when the file has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{self.path}: has no tensor '{name}'") from None

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as a view of the mapping."""
        info = self.info(name)
        return self._file.bytes[info.offset : info.offset + info.nbytes]

    def release(self, name: str) -> None:
        """Give the tensor's pages back to the system."""
        info = self.info(name)
        self._file.release(info.offset, info.nbytes)

    def close(self) -> None:
        """Drop the mapping."""
        self._file.close()


def _read_tensors(cursor: _Cursor, file: MappedFile, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    """The tensor table, with every place checked against the file's size."""
    heads: list[tuple[str, tuple[int, ...], str, int, int]] = []
    for index in range(count):
        cursor.what = f"tensor entry {index}"
        name = cursor.text()
        cursor.what = f"tensor '{name}'"
        num_dims = cursor.scalar("<I")
        if num_dims > _MAX_DIMS:
            raise cursor.fail(f"{num_dims} dimensions (at most {_MAX_DIMS})")
        shape = tuple(reversed([cursor.scalar("<Q") for _ in range(num_dims)]))
        type_id, offset = cursor.scalar("<I"), cursor.scalar("<Q")
        type_name, nbytes = _tensor_size(file, name, shape, type_id)
        heads.append((name, shape, type_name, offset, nbytes))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError(f"{file.path}: general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_name, offset, nbytes in heads:
        if name in tensors:
            raise ModelFileError(f"{file.path}: tensor '{name}' appears twice")
        if offset % alignment:
            raise ModelFileError(f"{file.path}: tensor '{name}' lies at {offset}, not a multiple of {alignment}")
        if start + offset + nbytes > len(file):
            raise ModelFileError(
                f"{file.path}: tensor '{name}' ends at byte {start + offset + nbytes}, but the file has only "
                f"{len(file)}; it is truncated, fetch it again"
            )
        tensors[name] = TensorInfo(name, shape, type_name, start + offset, nbytes, str(file.path))
    _check_overlaps(file.path, tensors)
    return tensors


def _tensor_size(file: MappedFile, name: str, shape: tuple[int, ...], type_id: int) -> tuple[str, int]:
    """Name of the storage type and bytes of the tensor."""
    if type_id not in _TENSOR_TYPES:
        known = ", ".join(entry[0] for entry in _TENSOR_TYPES.values())
        raise ModelFileError(f"{file.path}: tensor '{name}' has type number {type_id}; supported: {known}")
    type_name, block, block_bytes = _TENSOR_TYPES[type_id]
    width = shape[-1] if shape else 1
    if width % block:
        raise ModelFileError(f"{file.path}: tensor '{name}' has rows of {width} values, not whole {type_name} blocks")
    return type_name, prod(shape) // block * block_bytes


def _check_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    end, last = 0, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            raise ModelFileError(f"{path}: tensors '{last}' and '{info.name}' overlap; the file is broken")
        end, last = info.offset + info.nbytes, info.name
