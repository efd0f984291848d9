"""What goes wrong in a simulated run, as data: by step of the executor, or by request through its ``fault`` field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Phase = Literal["forward", "sample", "logits"]
Crash = Literal["memory", "file", "fault"]


class RequestFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A poisoned request, as `EngineCoreRequest.fault` spells it.

    ``phase`` says where it strikes: the forward or the sampling raises for the whole step, ``logits`` makes only this
    row non-finite. It strikes from the step on that computes position ``at``; ``repeat`` says whether ever again after
    the first time.
    """

    phase: Phase
    repeat: Literal["once", "always"] = "always"
    at: int = 0


def parse_fault(fault: dict[str, Any] | None) -> RequestFault | None:
    """The record of a request's ``fault`` field."""
    return None if fault is None else msgspec.convert(fault, RequestFault)


class SimulatedFault(RuntimeError):
    """Raised by a simulated forward or sampling."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults by the number of the forward that they strike, counted from 0 over the executor's life.

    ``fail_forward`` and ``fail_sample`` strike once and go away. ``slow_s`` adds seconds to a forward.
    ``die_at`` kills the workers: that forward and all that follows fail for good. ``hang_at`` never returns.
    At ``crash_at`` the executor itself raises, with ``crash`` saying what, which is the end of any core.
    """

    fail_forward: frozenset[int] = frozenset()
    fail_sample: frozenset[int] = frozenset()
    slow_s: dict[int, float] = field(default_factory=dict)
    die_at: int | None = None
    hang_at: int | None = None
    crash_at: int | None = None
    crash: Crash = "fault"


def make_crash(kind: Crash) -> Exception:
    """What a crash of a kind raises."""
    match kind:
        case "memory":
            return MemoryError("cannot allocate 1 TiB")
        case "file":
            return FileNotFoundError(2, "No such file or directory", "/models/weights")
        case "fault":
            return ValueError("a simulated crash")
