"""Profiles of a worker on request: every operator of the steps between start and stop, as a Chrome trace.

Owns at most one profile. A captured plan is one native call, so under a FULL graph the trace has one slice per forward;
``--enforce-eager`` shows each operator.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from headrace.base.errors import RequestFailedError
from headrace.base.postponed_imports import load_postponed
from headrace.config import env
from headrace.messages.requests import Profile

_IDLE: AbstractContextManager[Any] = nullcontext()


class Profiler:
    """Starts and stops profiles; must be used from one thread.

    Args:
        rank: of the worker, in the file's name.
        folder: where traces go; ``profiles`` beside the caches by default.
    """

    def __init__(self, rank: int = 0, folder: Path | None = None) -> None:
        self._rank = rank
        self._folder = folder
        self._profile: Any = None

    def apply(self, request: Profile) -> dict[str, str]:
        """Start, or stop and say where the trace lies.

        Raises:
            RequestFailedError: a profile runs already, or none does.
        """
        if request.start == (self._profile is not None):
            raise RequestFailedError("a profile is already being made" if request.start else "no profile was started")
        if request.start:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # The profiler imports parts of PyTorch that import each other.
            load_postponed()
            profile = torch.profiler.profile(activities=activities)
            profile.start()
            self._profile = profile
            return {"status": "started"}
        profile, self._profile = self._profile, None
        profile.stop()
        folder = self._folder or env.home() / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-rank{self._rank}.json"
        profile.export_chrome_trace(str(path))
        return {"status": "stopped", "path": str(path)}

    def slice(self, name: str) -> AbstractContextManager[Any]:
        """A named part of a step in the trace; nothing when no profile runs."""
        return _IDLE if self._profile is None else torch.profiler.record_function(name)
