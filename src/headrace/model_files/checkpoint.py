"""One way to open a checkpoint of any format."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import ModelFileError
from headrace.model_files.gguf import GGUFFile
from headrace.model_files.safetensors import SafetensorsCheckpoint
from headrace.model_files.source import TensorSource


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that ``path`` is or, as a folder without ``config.json``, holds; ``None`` for other checkpoints.

    Raises:
        ModelFileError: nothing at ``path``, or a folder with several GGUF files.
    """
    path = Path(path)
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir():
        raise ModelFileError(f"{path}: no such file or folder")
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelFileError(f"{path}: holds {len(files)} .gguf files; name the one to serve, for example {files[0]}")
    return files[0] if files else None


def open_checkpoint(path: str | Path) -> TensorSource:
    """Map the weights at ``path``: a ``.gguf`` or ``.safetensors`` file, or a folder with either.

    Raises:
        ModelFileError: missing, truncated or broken; the message names the file.
    """
    gguf = find_gguf(path)
    return GGUFFile.open(gguf) if gguf is not None else SafetensorsCheckpoint.open(path)
