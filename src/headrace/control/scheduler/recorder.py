"""The hook of the flight recorder: what was decided, told as it happens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from headrace.control.kv_cache.hashing import HashChain
from headrace.messages.outputs import FinishReason, SchedulerStats
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import StepStats
from headrace.messages.scheduler_output import SchedulerOutput


class WaitReason(str, Enum):
    """Why a request waits, or runs and got nothing in a step. Those behind a blocked head share its reason.

    ``PRIORITY``: what it lacks went to a more urgent request that came later. ``DRAIN``: nobody is admitted, for the
    engine sleeps, loads weights, or runs a failed step again.
    """

    TOKEN_BUDGET = "token_budget"
    INPUT_BUDGET = "input_budget"
    RUNNING_LIMIT = "running_limit"
    NO_BLOCKS = "no_blocks"
    GRAMMAR = "grammar"
    REMOTE_KVS = "remote_kvs"
    EXTERNAL_HIT = "external_hit"
    STEPS_IN_FLIGHT = "steps_in_flight"
    THROTTLED = "throttled"
    PREEMPTION = "preemption"
    PRIORITY = "priority"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks moved since the last step."""

    taken: int
    freed: int
    evicted: int
    cached: int


class StepRecorder(Protocol):
    """Takes the scheduler's decisions; never blocks, never raises."""

    def on_queued(self, record: EngineCoreRequest, chain: HashChain, now: float) -> None:
        """A request came; ``chain`` grows with its tokens and is for reading."""
        ...

    def on_waiting(self, request_id: str, reason: WaitReason, now: float) -> None:
        """The reason for which a request waits has changed."""
        ...

    def on_admitted(
        self, request_id: str, local_hit: int, external_hit: int, missed: bytes | None, resumed: bool, now: float
    ) -> None:
        """A request runs, with this many tokens from the caches; ``missed`` is the first block hash not found here."""
        ...

    def on_preempted(self, victim: str, cause: WaitReason, beneficiary: str, now: float) -> None:
        """``victim`` gave its blocks up for ``beneficiary`` (itself when nobody less urgent ran)."""
        ...

    def on_step(
        self,
        step: SchedulerOutput,
        blocks: BlockCounts,
        num_running: int,
        num_waiting: int,
        head_reason: WaitReason | None,
        ungranted: Mapping[str, WaitReason],
        now: float,
    ) -> None:
        """A step was scheduled, with its grants in ``num_scheduled_tokens``.

        ``head_reason`` is why the head waits; ``ungranted`` says why running requests got nothing.
        """
        ...

    def on_launched(self, step_id: int, now: float) -> None:
        """A step was handed to the executor."""
        ...

    def on_committed(self, step_id: int, blocks: BlockCounts, now: float) -> None:
        """A step was committed."""
        ...

    def on_updated(self, step_id: int, stats: StepStats | None, kv_usage: float, now: float) -> None:
        """The commit of a step is through; ``stats`` is what its runner measured."""
        ...

    def on_output(self, now: float) -> None:
        """The outputs of the latest step are ready to leave."""
        ...

    def add_totals(self, stats: SchedulerStats) -> SchedulerStats:
        """The statistics with what was recorded since start."""
        ...

    def on_finished(self, request_id: str, reason: FinishReason, num_output_tokens: int, now: float) -> None:
        """A request ended."""
        ...


class NullStepRecorder:
    """Takes decisions and forgets them."""

    def on_queued(self, record: EngineCoreRequest, chain: HashChain, now: float) -> None:
        return None

    def on_waiting(self, request_id: str, reason: WaitReason, now: float) -> None:
        return None

    def on_admitted(
        self, request_id: str, local_hit: int, external_hit: int, missed: bytes | None, resumed: bool, now: float
    ) -> None:
        return None

    def on_preempted(self, victim: str, cause: WaitReason, beneficiary: str, now: float) -> None:
        return None

    def on_step(
        self,
        step: SchedulerOutput,
        blocks: BlockCounts,
        num_running: int,
        num_waiting: int,
        head_reason: WaitReason | None,
        ungranted: Mapping[str, WaitReason],
        now: float,
    ) -> None:
        return None

    def on_launched(self, step_id: int, now: float) -> None:
        return None

    def on_committed(self, step_id: int, blocks: BlockCounts, now: float) -> None:
        return None

    def on_updated(self, step_id: int, stats: StepStats | None, kv_usage: float, now: float) -> None:
        return None

    def on_output(self, now: float) -> None:
        return None

    def add_totals(self, stats: SchedulerStats) -> SchedulerStats:
        return stats

    def on_finished(self, request_id: str, reason: FinishReason, num_output_tokens: int, now: float) -> None:
        return None
