"""The child process of a core, which can be started before anybody knows what it shall run.

Owns the process and the private folder of its sockets. Starting an interpreter and importing PyTorch take longer than
all else at start-up, so a server spawns first and reads its configuration meanwhile.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from types import TracebackType

from headrace.base.clock import SystemClock


class CoreProcess:
    """A spawned core that waits for its start message; see `core.process`.

    The thread that makes it must live as long as the core, for the kernel ends them together.

    Args:
        preload: module to import at once; it should be what the executor needs.

    Attributes:
        folder: of the sockets; only this user can look into it.
        popen: the process.
        spawned_at: `Clock.monotonic` seconds.
    """

    def __init__(self, preload: str = "") -> None:
        self.folder = tempfile.mkdtemp(prefix="headrace-")
        # Should nobody come to remove it: a client that is forgotten, an interpreter that ends.
        weakref.finalize(self, shutil.rmtree, self.folder, True)
        self.spawned_at = SystemClock().monotonic()
        words = [sys.executable, "-P", "-m", "headrace.core.process", self.folder, str(os.getpid()), preload]
        self.popen = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(self) -> None:
        """Kill, reap and remove the folder. Idempotent."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> CoreProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
