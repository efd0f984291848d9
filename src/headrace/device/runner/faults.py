"""The test hook that makes a chosen request fail.

A request carries ``{"phase": …, "repeat": …, "at": p}``: ``forward`` and ``sample`` raise for the whole step,
``logits`` makes only the request's row non-finite. It strikes ``once`` or ``always`` (the default) from the step on
that computes position ``at`` (default 0). What has struck is known by request and not by row, so that a step which
runs again does not bring it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.messages.scheduler_output import NewRequest


class InjectedFaultError(RuntimeError):
    """Raised for a request that asked for it."""


@dataclass(slots=True)
class _Fault:
    phase: str
    once: bool
    at: int
    spent: bool = False


class FaultHook:
    """Faults still to come, by request."""

    def __init__(self) -> None:
        self._faults: dict[str, _Fault] = {}

    def add(self, request: NewRequest) -> None:
        """Note a request's fault unless it is known already."""
        fault = request.fault
        if fault is not None and request.request_id not in self._faults:
            once = fault.get("repeat", "always") == "once"
            self._faults[request.request_id] = _Fault(fault["phase"], once, fault.get("at", 0))

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._faults.pop(request_id, None)

    def take_due(self, phase: str, request_ids: Sequence[str], seq_lens: Sequence[int]) -> list[int]:
        """Places of the requests whose fault strikes in this phase now."""
        if not self._faults:
            return []
        places = []
        for place, request_id in enumerate(request_ids):
            fault = self._faults.get(request_id)
            if fault is not None and fault.phase == phase and not fault.spent and fault.at < seq_lens[place]:
                fault.spent = fault.once
                places.append(place)
        return places

    def raise_if_due(self, phase: str, request_ids: Sequence[str], seq_lens: Sequence[int]) -> None:
        """Raise when the fault of any of the requests strikes in this phase."""
        if self.take_due(phase, request_ids, seq_lens):
            raise InjectedFaultError(f"injected fault in {phase}")
