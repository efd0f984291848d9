"""The hook of the flight recorder: what was decided, told as it happens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from headrace.messages.outputs import FinishReason
from headrace.messages.scheduler_output import SchedulerOutput


class WaitReason(str, Enum):
    """Why a waiting request waits. Those behind a blocked head share its reason."""

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


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks moved since the last step."""

    taken: int
    freed: int
    evicted: int
    cached: int


class StepRecorder(Protocol):
    """Takes the scheduler's decisions; never blocks, never raises."""

    def on_queued(self, request_id: str, num_prompt_tokens: int, now: float) -> None:
        """A request came."""
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
        self, step: SchedulerOutput, blocks: BlockCounts, num_running: int, num_waiting: int, now: float
    ) -> None:
        """A step was scheduled; its grants are in ``step.num_scheduled_tokens``."""
        ...

    def on_committed(self, step_id: int, blocks: BlockCounts, now: float) -> None:
        """A step was committed."""
        ...

    def on_finished(self, request_id: str, reason: FinishReason, num_output_tokens: int, now: float) -> None:
        """A request ended."""
        ...


class NullStepRecorder:
    """Takes decisions and forgets them."""

    def on_queued(self, request_id: str, num_prompt_tokens: int, now: float) -> None:
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
        self, step: SchedulerOutput, blocks: BlockCounts, num_running: int, num_waiting: int, now: float
    ) -> None:
        return None

    def on_committed(self, step_id: int, blocks: BlockCounts, now: float) -> None:
        return None

    def on_finished(self, request_id: str, reason: FinishReason, num_output_tokens: int, now: float) -> None:
        return None
