"""What the scheduler owns: requests, queues, steps in flight, and everything yet to be told.

`SchedulerState.finish` is the only way out of the scheduler, whatever the reason. The passes (`admission`,
`preemption`, `update`, `transfers`) act on this state; none of them keeps any of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.config.sections import SchedulerSection
from headrace.control.grammar.protocol import Grammar
from headrace.control.kv_cache.manager import KVCacheManager
from headrace.control.scheduler.budget import StepCost
from headrace.control.scheduler.queue import POLICIES, RequestQueue
from headrace.control.scheduler.recorder import BlockCounts, StepRecorder, WaitReason
from headrace.control.scheduler.request import STATUS_OF_REASON, Request, RequestStatus
from headrace.kv_connector.protocol import SchedulerConnector
from headrace.messages.outputs import EngineCoreOutput, FinishReason

Entry = tuple[Request, int, int, bool, int]
"""A request's part in a step: the request, its tokens, its ``num_computed_tokens`` after the step, whether the step
computes its last token (so that a new one is sampled), and how many of the tokens are drafts. A plain tuple, for there
is one for every request in every step."""


@dataclass(slots=True)
class InFlightStep:
    """A step that was handed out and has not been committed."""

    step_id: int
    entries: list[Entry]
    finished: list[str]
    preempted: list[str]
    num_prompt_tokens: int
    scheduled_at: float


@dataclass(slots=True)
class Totals:
    """Counters since start. Tokens are counted once, where they are sampled.

    ``corrupted`` counts requests whose logits were not finite; ``watermark_admitted`` and ``watermark_held`` those that
    were admitted beside others, and those that came to wait because blocks are kept free for others.
    """

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    corrupted: int = 0
    watermark_admitted: int = 0
    watermark_held: int = 0


class Lease(NamedTuple):
    """Blocks of an ended request that a transfer still uses; ``fence`` is its last step, when that is in flight."""

    deadline: float
    fence: int | None


@dataclass(slots=True)
class SchedulerState:
    """See the module.

    Attributes:
        num_draft_tokens: drafts per request that may be proposed; slots are kept for them.
        max_tokens: most tokens granted in a step.
        watermark_blocks: kept free when a request is admitted beside others.
        running: most urgent first; the last one is the next victim.
        waiting: requests without blocks.
        holding: requests that wait but hold blocks: being loaded, or loaded.
        ended_rows, preempted_rows: rows that the runner has yet to end.
        outbox: outputs not handed out yet, by client.
        blocked_head: the request that lacks blocks at the head of the queue, passed in ``num_bypass_steps`` steps.
        head_reason: why the head waits, shared by those behind it.
    """

    section: SchedulerSection
    kv: KVCacheManager
    connector: SchedulerConnector
    grammar: Grammar
    recorder: StepRecorder
    max_model_len: int
    num_draft_tokens: int
    max_tokens: int
    watermark_blocks: int
    has_connector: bool = False
    requests: dict[str, Request] = field(default_factory=dict)
    running: RequestQueue = field(init=False)
    waiting: RequestQueue = field(init=False)
    holding: RequestQueue = field(init=False)
    in_flight: deque[InFlightStep] = field(default_factory=deque)
    ended_rows: list[str] = field(default_factory=list)
    preempted_rows: list[str] = field(default_factory=list)
    outbox: dict[int, list[EngineCoreOutput]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    cost: StepCost = field(default_factory=StepCost)
    now: float = 0.0
    next_step_id: int = 0
    next_rank: int = 0
    last_commit: float = 0.0
    blocked_head: Request | None = None
    num_bypass_steps: int = 0
    head_reason: WaitReason | None = None
    _counts: tuple[int, int, int, int] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        policy = POLICIES.get(self.section.scheduling_policy)()
        self.running = RequestQueue(policy)
        self.waiting = RequestQueue(policy)
        self.holding = RequestQueue(policy)

    def set_wait_reason(self, request: Request, reason: WaitReason) -> None:
        """Note why a request waits; recorded when it changes."""
        if request.wait_reason is not reason:
            request.wait_reason = reason
            self.recorder.on_waiting(request.request_id, reason, self.now)

    def get_fence(self, request: Request) -> int | None:
        """The last step in flight that names the request's blocks."""
        return request.last_step if request.num_in_flight else None

    def finish(self, request: Request, reason: FinishReason) -> dict[str, Any] | None:
        """End a request and release all that it holds. Idempotent.

        Returns:
            The connector's parameters for the client.
        """
        if request.ended:
            return None
        before = request.status
        request.move(STATUS_OF_REASON[reason])
        del self.requests[request.request_id]
        if before is RequestStatus.RUNNING:
            self.running.remove(request)
        elif not self.waiting.remove(request):
            self.holding.remove(request)
        if request is self.blocked_head:
            self.blocked_head = None
        params = self._release_blocks(request, loading=before is RequestStatus.WAITING_FOR_REMOTE_KVS)
        if request.uses_grammar:
            self.grammar.forget(request.request_id)
        if request.has_row:
            self.ended_rows.append(request.request_id)
        self.recorder.on_finished(request.request_id, reason, request.num_output_tokens, self.now)
        return params

    def _release_blocks(self, request: Request, *, loading: bool) -> dict[str, Any] | None:
        request_id, fence = request.request_id, self.get_fence(request)
        if loading:
            # A writer may be at work in the blocks: they stay until it reports or its time is over.
            assert request.deadline is not None
            self.kv.lease(request_id)
            self.leases[request_id] = Lease(request.deadline, None)
            return None
        block_ids = self.kv.get_block_ids(request_id)
        lease = self.connector.on_finished(request.record, block_ids, request.num_committed_tokens)
        if lease.lease_s is not None and any(block_ids):
            self.kv.lease(request_id)
            self.leases[request_id] = Lease(self.now + lease.lease_s, fence)
        else:
            self.kv.free(request_id, fence)
        return lease.params

    def end_lease(self, request_id: str) -> None:
        """A transfer reported or expired; unknown ids are ignored."""
        lease = self.leases.pop(request_id, None)
        if lease is not None:
            pending = lease.fence is not None and self.in_flight and self.in_flight[0].step_id <= lease.fence
            self.kv.end_lease(request_id, lease.fence if pending else None)

    def end_with_output(self, request: Request, reason: FinishReason, error: str | None = None) -> EngineCoreOutput:
        """End a request outside a step's commit; the output is to be sent to its client."""
        params = self.finish(request, reason)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            times=request.make_times(),
            kv_transfer_params=params,
        )

    def fail(self, request: Request, error: str) -> None:
        """End a request with an error; the output waits in the outbox."""
        output = self.end_with_output(request, FinishReason.ERROR, error)
        self.outbox.setdefault(request.record.client_index, []).append(output)

    def take_block_counts(self) -> BlockCounts:
        """Blocks moved since the last call."""
        pool, old = self.kv.pool, self._counts
        new = (pool.num_taken, pool.num_freed, pool.num_evicted, pool.num_stored)
        self._counts = new
        return BlockCounts(new[0] - old[0], new[1] - old[1], new[2] - old[2], new[3] - old[3])
