"""The server of a benchmark: a process like ``headrace serve``, with a simulated executor unless told otherwise.

``python benchmarks/server_process.py '{"model": …, "step_s": …, …settings by field name}'`` serves until SIGTERM.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
READY = re.compile(r"ready on http://127\.0\.0\.1:(\d+)")


def serve(settings: dict[str, Any]) -> int:
    """Serve; ``step_s`` is the length of a simulated step, and ``None`` runs the real model."""
    from headrace.base.logging import setup_logging
    from headrace.config.sections import EngineConfig
    from headrace.core.client import EngineCoreClient
    from headrace.core.make_client import make_client
    from headrace.entrypoints.engine_config import load_engine_config
    from headrace.entrypoints.openai.options import ServerOptions
    from headrace.entrypoints.openai.server import run_server

    step_s = settings.pop("step_s")

    def make_core(config: EngineConfig) -> EngineCoreClient:
        if step_s is None:
            return make_client(config, "process")
        path = "headrace.testing.simulated_executor:make_executor"
        return make_client(config, "process", executor=path, options={"step_s": step_s})

    setup_logging()
    return run_server(load_engine_config(settings), ServerOptions(port=0, access_log=False), make_core)


class Server:
    """The process, what it uses, and what it says; the log of a failed start is the error."""

    def __init__(self, log: Path, **settings: Any) -> None:
        self._log = log.open("w+")
        words = [sys.executable, __file__, json.dumps({"step_s": 0.0, **settings})]
        self._process = subprocess.Popen(words, stderr=self._log)
        self.pid = self._process.pid
        while (match := READY.search(log.read_text())) is None:
            try:
                self._process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            raise SystemExit(log.read_text())
        self.port = int(match[1])

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        """It and its engine core."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def cpu_s(self) -> float:
        """User and system time of the server process, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_mib(self) -> list[float]:
        """Resident memory of each process, without that of mapped files."""
        found = []
        for pid in self.pids:
            status = Path(f"/proc/{pid}/status").read_text()
            found.append(int(status.split("RssAnon:")[1].split()[0]) / 1024)
        return found

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self._process.terminate()
        status = self._process.wait(60)
        self._log.close()
        return status


if __name__ == "__main__":
    sys.exit(serve(json.loads(sys.argv[1])))
