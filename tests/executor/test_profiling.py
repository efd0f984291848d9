"""Profiles: one at a time, with the parts of steps by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.base.errors import RequestFailedError
from headrace.executor.profiling import Profiler
from headrace.messages.requests import Profile


def test_a_profile_becomes_a_trace(tmp_path: Path) -> None:
    profiler = Profiler(folder=tmp_path)
    with profiler.slice("before"):
        pass
    profiler.apply(Profile(start=True))
    with pytest.raises(RequestFailedError, match="already"):
        profiler.apply(Profile(start=True))
    with profiler.slice("forward"):
        torch.ones(3) @ torch.ones(3)
    path = profiler.apply(Profile(start=False))["path"]
    names = {event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert "forward" in names and "aten::ones" in names and "before" not in names
    with pytest.raises(RequestFailedError, match="no profile"):
        profiler.apply(Profile(start=False))


@pytest.mark.slow
def test_it_starts_where_parts_of_pytorch_are_postponed() -> None:
    words = (
        "from headrace.base.postponed_imports import postpone; from headrace.core.process import _SELDOM_USED; "
        "postpone(_SELDOM_USED); from headrace.executor.profiling import Profiler; "
        "from headrace.messages.requests import Profile; print(Profiler().apply(Profile(start=True)))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert "started" in done.stdout, done.stderr
