"""A real server's first seconds: its timeline leaves nothing out, and its log is JSON when asked for."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.http.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
FLAGS = ("--max-model-len", "256", "--num-kv-blocks", "65", "--log-format", "json")
_PHASE = re.compile(r"(\w+) (\d+)")


def test_the_timeline_covers_the_time_to_ready(smollm2_gguf: Path) -> None:
    began = time.monotonic()
    with ServerProcess(smollm2_gguf, *FLAGS, simulated_step_s=0.001) as server:
        server.wait_ready()
        whole_ms = 1e3 * (time.monotonic() - began)
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "logger", "process", "message"} <= line.keys() for line in lines)
    assert len({line["process"] for line in lines}) == 2, "the core's lines are JSON too"
    told = next(line["message"] for line in lines if line["message"].startswith("start-up in ms"))
    outer, _, inner = told.removeprefix("start-up in ms: ").partition("; inside engine: ")
    phases = {name: int(ms) for name, ms in _PHASE.findall(outer)}
    assert list(phases) == ["setup", "engine", "listen"]
    assert sum(phases.values()) >= 0.95 * whole_ms - 50
    inner, _, beside = inner.partition("; ")
    core_ms = sum(int(ms) for _, ms in _PHASE.findall(inner))
    ((_, front_end_ms),) = _PHASE.findall(beside)
    # Two processes start side by side; the later one decides.
    assert max(core_ms, int(front_end_ms)) >= 0.9 * phases["engine"] - 50, told
