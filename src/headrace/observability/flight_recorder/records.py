"""What the flight recorder keeps: one record per step, one log per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.messages.requests import EngineCoreRequest

PHASES = ("schedule", "prepare", "forward", "sample", "update", "output")


class BlockCounts(Protocol):
    """Blocks moved since the last report."""

    @property
    def taken(self) -> int: ...

    @property
    def freed(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    @property
    def cached(self) -> int: ...


class Chain(Protocol):
    """The block hashes of a request, growing as its tokens become certain."""

    block_size: int
    hashes: list[bytes]
    extra_keys: tuple[Any, ...]
    owner: str | None


class StepRecord:
    """One step.

    Attributes:
        granted: tokens by request, in scheduling order; dropped from old records.
        chunks: the grants of more than one token, and of recomputing requests; the others decode.
        skipped: running requests that got nothing, and why.
        head_reason: why the head of the queue waits, and with it those behind.
        committed: 0 until it has been committed; a step that failed never is.
        blocks: taken, freed, evicted, cached between the step before and the commit.
        phases: seconds in the order of `PHASES`.
    """

    __slots__ = (
        "admitted",
        "blocks",
        "chunks",
        "committed",
        "granted",
        "graph_mode",
        "graph_reason",
        "head_reason",
        "kv_usage",
        "num_requests",
        "num_running",
        "num_tokens",
        "num_waiting",
        "phases",
        "preempted",
        "scheduled",
        "skipped",
        "step_id",
    )

    def __init__(self, step_id: int, scheduled: float) -> None:
        self.step_id = step_id
        self.scheduled = scheduled
        self.committed = 0.0
        self.granted: dict[str, int] | None = None
        self.chunks: dict[str, int] = {}
        self.skipped: dict[str, str] = {}
        self.admitted: Sequence[str] = ()
        self.preempted: Sequence[tuple[str, str, str]] = ()
        self.head_reason: str | None = None
        self.num_requests = 0
        self.num_tokens = 0
        self.num_running = 0
        self.num_waiting = 0
        self.kv_usage = 0.0
        self.blocks = [0, 0, 0, 0]
        self.phases = [0.0] * len(PHASES)
        self.graph_mode = ""
        self.graph_reason = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for tools."""
        taken, freed, evicted, cached = self.blocks
        return {
            "step": self.step_id,
            "scheduled": self.scheduled,
            "committed": self.committed,
            "granted": self.granted,
            "chunks": self.chunks,
            "skipped": self.skipped,
            "admitted": list(self.admitted),
            "preempted": [{"victim": v, "cause": c, "for": b} for v, c, b in self.preempted],
            "waiting_reason": self.head_reason,
            "num_tokens": self.num_tokens,
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "kv_usage": self.kv_usage,
            "blocks": {"taken": taken, "freed": freed, "evicted": evicted, "cached": cached},
            "phases_ms": {name: 1e3 * value for name, value in zip(PHASES, self.phases, strict=True)},
            "graph_mode": self.graph_mode,
            "graph_reason": self.graph_reason,
        }


@dataclass(slots=True)
class Admission:
    """A request began to run, or runs again."""

    time: float
    step_id: int
    local_hit: int
    external_hit: int
    resumed: bool


@dataclass(slots=True)
class Preemption:
    """A request gave its blocks up."""

    time: float
    step_id: int
    cause: str
    beneficiary: str


@dataclass(slots=True)
class RequestLog:
    """What happened to one request in the core. ``prefix`` says how much its prompt hit, and why not more."""

    request_id: str
    num_prompt_tokens: int
    queued: float
    record: EngineCoreRequest | None
    chain: Chain | None
    waits: list[tuple[float, str]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    prefix: dict[str, Any] = field(default_factory=dict)
    finished: float = 0.0
    finish_reason: str = ""
    num_output_tokens: int = 0

    @property
    def state(self) -> str:
        """``waiting``, ``running``, ``preempted`` or ``finished``."""
        if self.finished:
            return "finished"
        if not self.admissions:
            return "waiting"
        return "preempted" if len(self.preemptions) == len(self.admissions) else "running"
