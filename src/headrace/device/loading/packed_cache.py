"""Weights as an earlier start packed them: kept on disk, checked and mapped at the next start.

Owns the folder of these files and their format. One file holds all weights of one rank, in the order in which they were
packed. Its name is a key over

- the content of the model's files, which are read whole for it, whatever they are called and wherever they lie: a copy
  finds what the original packed, a file that was written to never does. Hashed on all threads, they cost about 12 ms
  per 100 MB that are in memory already. The hash is quick and finds accidents; whoever can have a forged file loaded
  needs no collision;
- the code that reads and packs, the native library included, so that there is no version to forget;
- the settings that the packed bytes depend on. The instruction set is none of them: all share one layout.

A file appears whole (it is written beside its place and renamed) and is never changed; mapped files may be removed.
Every piece carries a checksum, which is looked at before the piece is used: one that is spoilt, and all
behind it, are packed anew, and the file is replaced. The folder is bounded: the files used longest ago go first.

File: a page with the magic number and where the index lies; the pieces, each on a page border; the index.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

import headrace
from headrace.base.errors import ModelFileError
from headrace.base.logging import get_logger
from headrace.config import env
from headrace.config.sections import EngineConfig
from headrace.config.units import format_size
from headrace.device.distributed.groups import ParallelGroups
from headrace.device.ops.cpu._native import hash_bytes
from headrace.model_files.checkpoint import find_gguf

logger = get_logger(__name__)

LEAST_BYTES = 16 << 20
"""Less than this is packed before a file is opened."""

_PAGE = 4096
_HEAD = struct.Struct("<8sQQ32s")
_MAGIC = b"hrpacked"
_CHUNK = 8 << 20
_STALE_S = 60.0


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    size: int
    checksum: int


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """One weight: what it was packed from, and where its pieces lie."""

    form: str
    pieces: list[_Piece]


_decode_index = msgspec.msgpack.Decoder(list[_Entry]).decode


class PackedCache:
    """The packed weights of one load, taken from a file or packed and then kept in one.

    Args:
        path: the file, which need not exist.
        max_bytes: bound of the folder.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept: list[tuple[str, Sequence[np.ndarray]]] = []
        self._num_fresh = 0
        self._data: np.ndarray | None = None
        self._entries: list[_Entry] = []
        try:
            self._data, self._entries = _open(path)
            os.utime(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used (%s); the weights are packed anew", path, error)

    def take(self, form: str) -> Sequence[np.ndarray] | None:
        """The pieces of the next weight, if it is kept and was packed from ``form``; read-only views of the mapping."""
        place = len(self._kept)
        if self._data is None or place >= len(self._entries):
            return None
        entry = self._entries[place]
        pieces = [self._data[piece.offset : piece.offset + piece.size] for piece in entry.pieces]
        if entry.form != form or any(
            len(data) != piece.size or hash_bytes(data) != piece.checksum
            for data, piece in zip(pieces, entry.pieces, strict=True)
        ):
            logger.warning("%s is spoilt at weight %d; the rest is packed anew", self.path, place)
            self._data = None
            return None
        self._kept.append((form, pieces))
        return pieces

    def keep(self, form: str, pieces: Sequence[np.ndarray]) -> None:
        """Note a weight that was packed."""
        self._kept.append((form, pieces))
        self._num_fresh += 1

    def finish(self) -> None:
        """All weights are there: tell where they came from, and keep those that were packed."""
        size = sum(len(piece) for _, pieces in self._kept for piece in pieces)
        if not self._num_fresh:
            logger.info("weights: %s as packed by an earlier start, from %s", format_size(size), self.path)
        elif size > self._max_bytes:
            logger.info("weights: packed; %s are too many for --packed-cache to keep", format_size(size))
        elif size >= LEAST_BYTES:
            logger.info("weights: packed; %s are kept for the next start in %s", format_size(size), self.path)
            self._write()

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Writers of the same file may have one process id, each in its container.
            staged = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
            try:
                _write(staged, self._kept)
                staged.replace(self.path)
            finally:
                staged.unlink(missing_ok=True)
            _trim(self.path, self._max_bytes)
        except OSError as error:
            folder = self.path.parent
            logger.warning("packed weights cannot be kept in %s (%s); --packed-cache 0 keeps none", folder, error)


def open_packed_cache(config: EngineConfig, parallel: ParallelGroups | None) -> PackedCache:
    """The cache of what ``config`` loads on this rank."""
    assert config.model.packed_cache
    groups = parallel if parallel is not None else ParallelGroups()
    ranks = (groups.tp.rank, groups.tp.size, groups.pp.rank, groups.pp.size)
    key = hashlib.sha256(_hash_code())
    key.update(repr((config.model.quantization, config.model.dtype, ranks)).encode())
    with ThreadPoolExecutor(max(1, config.parallel.num_threads)) as pool:
        key.update(repr(sorted(_hash_file(file, pool) for file in _model_files(Path(config.model_path)))).encode())
    return PackedCache(env.home() / "packed" / key.hexdigest()[:32], config.model.packed_cache)


def _model_files(path: Path) -> Iterable[Path]:
    """What weights, and how they are read, depend on."""
    gguf = find_gguf(path)
    if gguf is not None or not path.is_dir():
        return [gguf or path]
    return [child for child in path.iterdir() if child.suffix in (".safetensors", ".json")]


def _hash_file(path: Path, pool: ThreadPoolExecutor) -> str:
    """Of the content alone.

    Raises:
        ModelFileError: it cannot be read.
    """
    try:
        data = _map(path)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    chunks = pool.map(hash_bytes, (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)))
    return hashlib.sha256(repr((len(data), list(chunks))).encode()).hexdigest()


def _hash_code() -> bytes:
    """Of everything that packed bytes may depend on."""
    root = Path(headrace.__file__).parent
    digest = hashlib.sha256()
    for room in ("device", "model_files"):
        for file in sorted((root / room).rglob("*")):
            if file.suffix in (".py", ".so"):
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


def _open(path: Path) -> tuple[np.ndarray, list[_Entry]]:
    """Map a file and read its index.

    Raises:
        FileNotFoundError: there is none.
        OSError, ValueError: it cannot be read, or is not what was written.
    """
    data = _map(path)
    if len(data) < _PAGE:
        raise ValueError("it is cut short")
    magic, offset, size, checksum = _HEAD.unpack_from(data.data)
    index = data[offset : offset + size].tobytes()
    if magic != _MAGIC or offset + size != len(data) or hashlib.sha256(index).digest() != checksum:
        raise ValueError("its index is spoilt")
    return data, _decode_index(index)


def _map(path: Path) -> np.ndarray:
    """The bytes of a file, as long as it is not changed."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _write(path: Path, weights: Iterable[tuple[str, Sequence[np.ndarray]]]) -> None:
    """Write a whole file. It is not flushed: what a crash of the machine tears is found by its checksums."""
    entries, offset = [], _PAGE
    data: list[memoryview | bytes] = []
    for form, pieces in weights:
        places = []
        for piece in pieces:
            places.append(_Piece(offset, len(piece), hash_bytes(piece)))
            padding = -len(piece) % _PAGE
            data += [piece.data, bytes(padding)]
            offset += len(piece) + padding
        entries.append(_Entry(form, places))
    index = msgspec.msgpack.encode(entries)
    head = _HEAD.pack(_MAGIC, offset, len(index), hashlib.sha256(index).digest())
    # In large writes, for the kernel maps files by the pages in which they were written.
    with path.open("wb", buffering=0) as file:
        batch = bytearray()
        for part in (head.ljust(_PAGE, b"\0"), *data, index):
            for start in range(0, len(part), _CHUNK):
                batch += part[start : start + _CHUNK]
                if len(batch) >= _CHUNK:
                    _write_whole(file.fileno(), memoryview(batch)[:_CHUNK])
                    batch = batch[_CHUNK:]
        _write_whole(file.fileno(), memoryview(batch))


def _write_whole(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _trim(newest: Path, max_bytes: int) -> None:
    """Remove the files used longest ago until the rest fits, and what dead writers left behind."""
    files = []
    for file in newest.parent.iterdir():
        try:
            found = file.stat()
        except FileNotFoundError:
            continue
        if file.name.startswith("."):
            if time.time() - found.st_mtime > _STALE_S:
                file.unlink(missing_ok=True)
        elif file != newest:
            files.append((found.st_mtime, found.st_size, file))
    total = newest.stat().st_size + sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= max_bytes:
            return
        file.unlink(missing_ok=True)
        total -= size
