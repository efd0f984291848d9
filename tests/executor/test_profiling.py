"""Profiles: one at a time, with the parts of steps by name."""

from __future__ import annotations

import json
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
