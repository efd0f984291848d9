"""Safetensors checkpoints: one file, or shards under an index. Read without PyTorch, by mapping.

Owns which file a tensor comes from. The index is the authority: a tensor is taken from the shard that the index names,
copies elsewhere and stray files are not looked at, and whatever the index names must be there.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import ModelFileError
from headrace.model_files.source import MappedFile, TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class SafetensorsCheckpoint:
    """The tensors of a checkpoint; one mapping per shard."""

    def __init__(self, files: dict[str, MappedFile], tensors: dict[str, TensorInfo]) -> None:
        self._files = files
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsCheckpoint:
        """Open a ``.safetensors`` file or a folder that holds one or an index.

        Raises:
            ModelFileError: nothing to open, or anything that the index names is missing, truncated or inconsistent.
        """
        path = Path(path)
        if path.is_file():
            return cls._open_single(path)
        if (path / INDEX_NAME).is_file():
            return cls._open_sharded(path / INDEX_NAME)
        if (path / SINGLE_NAME).is_file():
            return cls._open_single(path / SINGLE_NAME)
        others = sorted(p.name for p in path.glob("*.safetensors"))
        if others:
            raise ModelFileError(
                f"{path}: has {', '.join(others[:5])} but neither {INDEX_NAME} nor {SINGLE_NAME}; without the index it "
                "cannot be told which tensors belong to the model"
            )
        raise ModelFileError(f"{path}: holds no model weights (neither {INDEX_NAME} nor {SINGLE_NAME})")

    @classmethod
    def _open_single(cls, path: Path) -> SafetensorsCheckpoint:
        file = MappedFile(path)
        return cls({str(path): file}, read_header(file))

    @classmethod
    def _open_sharded(cls, index_path: Path) -> SafetensorsCheckpoint:
        weight_map = _read_index(index_path)
        files: dict[str, MappedFile] = {}
        headers: dict[str, dict[str, TensorInfo]] = {}
        for shard in sorted(set(weight_map.values())):
            shard_path = index_path.parent / shard
            if not shard_path.is_file():
                raise ModelFileError(f"{shard_path}: is missing, but {index_path.name} names it; fetch the model again")
            file = MappedFile(shard_path)
            files[str(shard_path)], headers[shard] = file, read_header(file)
        tensors: dict[str, TensorInfo] = {}
        for name, shard in weight_map.items():
            if name not in headers[shard]:
                raise ModelFileError(
                    f"{index_path.parent / shard}: has no tensor '{name}', but {index_path.name} says so"
                )
            tensors[name] = headers[shard][name]
        return cls(files, tensors)

    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Place of a tensor; raises `ModelFileError` when the checkpoint has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{' and '.join(self._files)}: no tensor '{name}'") from None

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as a view of the mapping."""
        info = self.info(name)
        return self._files[info.file].bytes[info.offset : info.offset + info.nbytes]

    def release(self, name: str) -> None:
        """Give the tensor's pages back to the system."""
        info = self.info(name)
        self._files[info.file].release(info.offset, info.nbytes)

    def close(self) -> None:
        """Drop the mappings."""
        for file in self._files.values():
            file.close()


def _read_index(path: Path) -> dict[str, str]:
    """The index's table of tensor → shard."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise ModelFileError(f"{path}: is not an index with a 'weight_map'; fetch it again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: 'weight_map' is empty or not a table")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelFileError(f"{path}: tensor '{name}' has shard {shard!r}, not a file name in the same folder")
    return weight_map


def read_header(file: MappedFile) -> dict[str, TensorInfo]:
    """The tensor table of one file, checked against its size.

    Raises:
        ModelFileError: truncated, broken, with overlapping tensors, or with bytes that belong to none.
    """
    path, size = file.path, len(file)
    if size < 8:
        raise ModelFileError(f"{path}: has {size} bytes and cannot be a safetensors file; fetch it again")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise ModelFileError(f"{path}: header of {length} bytes in a file of {size}; truncated or not safetensors")
    try:
        header = json.loads(file.read(8, 8 + length))
    except ValueError:
        raise ModelFileError(f"{path}: the header is not JSON; the file is broken, fetch it again") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: the header is not a table; the file is broken, fetch it again")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _read_entry(path, name, entry, start) for name, entry in header.items()}
    end, last = start, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            problem = f"overlaps '{last}'" if info.offset < end else "leaves a gap before it"
            raise ModelFileError(f"{path}: tensor '{info.name}' {problem}; the file is broken, fetch it again")
        end, last = info.offset + info.nbytes, info.name
    if end != size:
        problem = "is truncated" if end > size else "has bytes that belong to no tensor"
        raise ModelFileError(f"{path}: {problem} (tensors end at byte {end}, the file at {size}); fetch it again")
    return tensors


def _read_entry(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    try:
        type_name, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        well_formed = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise ModelFileError(f"{path}: the entry of tensor '{name}' is broken; fetch the file again")
    if type_name not in _ITEM_BYTES:
        raise ModelFileError(f"{path}: tensor '{name}' has dtype {type_name!r}; supported: {', '.join(_ITEM_BYTES)}")
    nbytes = prod(shape) * _ITEM_BYTES[type_name]
    if end - begin != nbytes:
        raise ModelFileError(f"{path}: tensor '{name}' has {end - begin} bytes, but its shape needs {nbytes}")
    return TensorInfo(name, shape, type_name, start + begin, nbytes, str(path))
