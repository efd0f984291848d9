"""Takes a model's tensors out of a checkpoint, and holds the account of them.

Owns the rule that every tensor of the model is set exactly once and every tensor of the file is used or on the ignore
list; anything else is an error that names the tensor. It knows names and shapes, not what the numbers are for.

A model asks for *slots* (``layers.3.q``, ``final_norm``); a `WeightMap` says where a slot lies in a kind of file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import torch

from headrace.base.errors import ModelFileError
from headrace.device.quantization.formats import format_by_name
from headrace.device.quantization.raw_tensor import RawTensor
from headrace.model_files.source import TensorSource

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lies: the tensor's name, with ``{layer}`` for the layer's number.

    ``interleaved_rotary`` marks rows stored in the pairing (2 i, 2 i + 1) within each head; they are put back into
    halves. ``shared`` marks a tensor whose rows belong to several slots.
    """

    name: str
    interleaved_rotary: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Slots of one family in one kind of file.

    Attributes:
        places: slot without its layer number (``layers.q``) → place.
        ignore: patterns of names that may be in the file and are not needed.
        norm_offset: what must be added to stored norm weights.
    """

    places: Mapping[str, Place]
    ignore: tuple[str, ...] = ()
    norm_offset: float = 0.0

    def with_places(self, changes: Mapping[str, Place | None]) -> WeightMap:
        """A copy with places replaced, added, or removed (``None``)."""
        places = {slot: place for slot, place in (dict(self.places) | dict(changes)).items() if place is not None}
        return replace(self, places=places)


@dataclass(slots=True)
class WeightReader:
    """Hands out the tensors of one checkpoint, each slot once.

    `finish` must be called when the model is complete.
    """

    source: TensorSource
    weight_map: WeightMap
    progress: Progress | None = None
    _names: frozenset[str] = field(init=False)
    _unused: set[str] = field(init=False)
    _taken: set[str] = field(init=False, default_factory=set)
    _done_bytes: int = field(init=False, default=0)
    _total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._names = frozenset(self.source.names())
        self._unused = set(self._names)
        self._total_bytes = sum(self.source.info(name).nbytes for name in self._unused)

    def matrix(
        self, slot: str, rows: int, cols: int, *, head_dim: int = 0, part_of: tuple[int, int] | None = None
    ) -> RawTensor:
        """Take a 2-D slot.

        Args:
            head_dim: rows per head, for slots that may be stored with interleaved rotary rows.
            part_of: first row and number of rows in all, for slots that may share a tensor with others.

        Raises:
            ModelFileError: missing, wrong shape, unsupported format, or cut short.
        """
        place, raw = self._take(slot)
        first_row, all_rows = part_of if place.shared and part_of else (0, rows)
        self._check_shape(raw, (all_rows, cols))
        if all_rows != rows:
            raw = raw.take_rows(slice(first_row, first_row + rows))
        return raw.take_rows(_halves_first(rows, head_dim)) if place.interleaved_rotary else raw

    def vector(
        self, slot: str, size: int, *, head_dim: int = 0, part_of: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Take a 1-D slot as float32; the arguments are those of `matrix`."""
        place, raw = self._take(slot)
        first, total = part_of if place.shared and part_of else (0, size)
        self._check_shape(raw, (total,))
        values = raw.dequantize()[first : first + size]
        if place.interleaved_rotary:
            values = values[_halves_first(size, head_dim)]
        return torch.from_numpy(values)

    def norm(self, slot: str, size: int) -> torch.Tensor:
        """Take a norm's weights, with the family's offset added."""
        return self.vector(slot, size) + self.weight_map.norm_offset

    def done(self, *raws: RawTensor) -> None:
        """Count tensors that have been packed, and give their pages back."""
        for raw in raws:
            self._done_bytes += raw.data.nbytes
            self.source.release(raw.name)
        if self.progress is not None:
            self.progress(min(self._done_bytes, self._total_bytes), self._total_bytes)

    def skip(self, slots: Iterable[str]) -> None:
        """Count slots as used that belong to other ranks."""
        for slot in slots:
            self._unused.discard(self._locate(slot)[1])

    def finish(self) -> None:
        """Check that nothing is left over.

        Raises:
            ModelFileError: tensors of the file that the model does not know.
        """
        ignore = [re.compile(pattern) for pattern in self.weight_map.ignore]
        extra = sorted(name for name in self._unused if not any(p.fullmatch(name) for p in ignore))
        if extra:
            more = f" and {len(extra) - _MAX_LISTED} more" if len(extra) > _MAX_LISTED else ""
            raise ModelFileError(
                f"the checkpoint has tensors that this model does not use: {', '.join(extra[:_MAX_LISTED])}{more}"
            )
        if self.progress is not None:
            self.progress(self._total_bytes, self._total_bytes)

    def _locate(self, slot: str) -> tuple[Place | None, str]:
        """The slot's place and its tensor's name."""
        generic, layer = slot, ""
        if slot.startswith("layers."):
            _, layer, rest = slot.split(".", 2)
            generic = f"layers.{rest}"
        place = self.weight_map.places.get(generic)
        return place, "" if place is None else place.name.format(layer=layer)

    def _take(self, slot: str) -> tuple[Place, RawTensor]:
        assert slot not in self._taken, f"{slot} is set twice"
        place, name = self._locate(slot)
        assert place is not None, f"the weight map has no place for {slot}"
        if name not in self._names:
            raise ModelFileError(f"the checkpoint has no tensor '{name}', which this model needs")
        self._taken.add(slot)
        self._unused.discard(name)
        return place, read_tensor(self.source, name)

    @staticmethod
    def _check_shape(raw: RawTensor, shape: tuple[int, ...]) -> None:
        if raw.shape != shape:
            raise ModelFileError(f"tensor '{raw.name}' has shape {list(raw.shape)}, but the model needs {list(shape)}")


def read_tensor(source: TensorSource, name: str) -> RawTensor:
    """The tensor as a view of the file's bytes.

    Raises:
        ModelFileError: its format is not supported, or its bytes are fewer than its shape needs.
    """
    info = source.info(name)
    try:
        fmt = format_by_name(info.type_name)
    except ModelFileError as error:
        raise ModelFileError(f"tensor '{name}': {error}") from None
    shape = info.shape or (1,)
    rows, width = prod(shape[:-1]), shape[-1]
    if width % fmt.block:
        raise ModelFileError(f"tensor '{name}' has rows of {width} values, not whole {fmt.name} groups of {fmt.block}")
    data = source.raw(name)
    row_bytes = width // fmt.block * fmt.block_bytes
    if data.size != rows * row_bytes:
        raise ModelFileError(f"tensor '{name}' has {data.size} bytes, but its shape needs {rows * row_bytes}")
    return RawTensor(name, tuple(shape), fmt, data.reshape(rows, row_bytes))


def _halves_first(rows: int, head_dim: int) -> np.ndarray:
    """For each row in half-split order, where it lies in a file that keeps rotary pairs side by side."""
    assert head_dim and rows % head_dim == 0
    within = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    return (np.arange(0, rows, head_dim)[:, None] + within).reshape(-1)
