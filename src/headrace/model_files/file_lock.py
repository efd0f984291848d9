"""A lock between processes, held on a file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.base.errors import ModelFileError
from headrace.base.logging import get_logger

logger = get_logger(__name__)
_POLL_S = 0.1


@contextmanager
def hold_file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold ``path`` exclusively. The system drops the lock when its holder dies, so that none is ever stale.

    Raises:
        ModelFileError: another process held it for longer than ``timeout_s``, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ModelFileError(
            f"{path.parent}: cannot be written ({error.strerror or error}); set HEADRACE_HOME to a folder that can"
        ) from None
    try:
        _acquire(descriptor, path, timeout_s)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise ModelFileError(
                f"{path}: cannot be locked ({error.strerror or error}); set HEADRACE_HOME to a local folder"
            ) from None
        if not waiting:
            logger.info("waiting for another process that fetches the same model (%s)", path.name)
            waiting = True
        if time.monotonic() > deadline:
            raise ModelFileError(
                f"{path}: another process has held this lock for {timeout_s:.0f} s; end it and start again"
            )
        time.sleep(_POLL_S)
