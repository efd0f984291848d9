"""A real server: its own process, the real model, a free port."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0
_READY = re.compile(r"ready on (http://\S+)")


class ServerProcess:
    """Started in the constructor, ended with the ``with`` block; the log is kept in ``lines``.

    ``simulated_step_s`` and ``simulated`` (more options) are for the simulated executor; ``hooked`` runs the real one
    with the hooks of `tests.http.hooked_server`.
    """

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        simulated_step_s: float | None = None,
        simulated: dict[str, Any] | None = None,
        hooked: bool = False,
    ) -> None:
        words = [sys.executable, "-m", "headrace.entrypoints.cli.main", "serve", str(model), "--port", "0", *flags]
        if hooked or simulated_step_s is not None:
            options = None if simulated_step_s is None else {"step_s": simulated_step_s, **(simulated or {})}
            words[2:4] = ["tests.http.hooked_server"]
            words.insert(4, json.dumps(options))
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def wait_ready(self) -> str:
        """Return the base URL."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with self._news:
            while True:
                for line in self.lines:
                    if match := _READY.search(line):
                        self.url = match[1]
                        return self.url
                assert self.process.poll() is None and time.monotonic() < deadline, "\n".join(self.lines)
                self._news.wait(0.5)

    def core_pid(self) -> int:
        """Process id of the engine core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return next(pid for pid, name in names.items() if b"headrace.core.process" in name)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        """The exit status, and all of the log has been read."""
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status
