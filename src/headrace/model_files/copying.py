"""Moving bytes with a progress bar, and the shape of a source of files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any, Protocol

from tqdm import tqdm

_CHUNK_BYTES = 1 << 20


class Fetcher(Protocol):
    """One place that a known file may come from.

    ``name`` is a word for folder names, ``title`` is for people.
    """

    name: str
    title: str

    def fetch(self, staging: Path, show_progress: bool) -> Path:
        """Put the file somewhere under ``staging`` (an empty folder) and return its path.

        Raises:
            ModelFileError: this source does not have it or cannot be reached.
        """
        ...


def copy_stream(source: IO[bytes], target: Path, num_bytes: int, title: str, show_progress: bool) -> None:
    """Write a stream to a file."""
    with target.open("wb") as out, make_bar(num_bytes, title, show_progress) as bar:
        while chunk := source.read(_CHUNK_BYTES):
            out.write(chunk)
            bar.update(len(chunk))


def hash_file(path: Path, show_progress: bool = False) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file, make_bar(path.stat().st_size, f"checking {path.name}", show_progress) as bar:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def make_bar(num_bytes: int, title: str, show_progress: bool) -> tqdm[Any]:
    """A bar of bytes on standard error; none where that is not a terminal."""
    disable = None if show_progress else True
    return tqdm(total=num_bytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=disable)
