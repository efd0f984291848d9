"""What the loader sees of a checkpoint, whichever format it has.

A `TensorSource` maps names to bytes. It owns the file mappings, never copies a tensor and knows nothing of models.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.base.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    ``shape`` is row-major, the contiguous dimension last. ``type_name`` is the storage format (``F32``, ``BF16``,
    ``Q4_1``, …). ``offset`` counts from the start of ``file``.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int
    file: str


class TensorSource(Protocol):
    """Named tensors of one checkpoint."""

    def names(self) -> list[str]:
        """Every tensor that the checkpoint has."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, format and place; raises `ModelFileError` when there is no such tensor."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes: a read-only uint8 view of the mapping, valid until `close`."""
        ...

    def release(self, name: str) -> None:
        """Tell the system that the tensor's pages are not needed any more; reading them again works."""
        ...

    def close(self) -> None:
        """Drop the mappings; views that are still held keep them alive."""
        ...


class MappedFile:
    """A file mapped read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: no such file") from None
        except ValueError:
            raise ModelFileError(f"{path}: the file is empty; fetch it again") from None
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
        self.bytes: np.ndarray = np.frombuffer(self._map, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._map)

    def read(self, start: int, stop: int) -> bytes:
        """A copy of bytes ``start:stop`` (shorter at the end of the file)."""
        return self._map[start:stop]

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the whole pages of a range to the system."""
        if not hasattr(self._map, "madvise"):
            return
        page = mmap.PAGESIZE
        start = -(-offset // page) * page
        stop = (offset + nbytes) // page * page
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Drop this object's hold on the mapping; it is unmapped with its last view."""
        self.bytes = np.empty(0, dtype=np.uint8)
