"""Preemption by recompute: a victim gives its blocks back and keeps its rank.

Running requests stand in the order of urgency and are granted in that order, so the victim, the last one, has never
been granted in the step that needs its blocks: nothing has to be taken back.
"""

from __future__ import annotations

from headrace.control.scheduler.recorder import WaitReason
from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import SchedulerState
from headrace.messages.scheduler_output import BlockIds


def preempt(state: SchedulerState, victim: Request, beneficiary: str, cause: WaitReason, *, drop: bool = False) -> None:
    """Send a running request back to its place in the queue.

    Its blocks are freed behind a fence while a step in flight names them. Tokens of those steps are delivered when they
    come (they were computed from valid KV), and it resumes only then. ``drop`` marks them as dropped, and so does
    a load within those steps that may yet turn out invalid.
    """
    state.running.remove(victim)
    state.kv.free(victim.request_id, state.get_fence(victim))
    victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_committed_tokens)
    victim.num_computed_tokens = 0
    victim.num_committed_tokens = 0
    victim.num_slots = 0
    victim.spec_token_ids = []
    victim.num_preemptions += 1
    victim.needs_row = True
    if victim.has_row:
        victim.has_row = False
        state.preempted_rows.append(victim.request_id)
    if drop or victim.loads_in_step:
        victim.restart(0)
        victim.loads_in_step = False
    victim.move(RequestStatus.PREEMPTED)
    state.waiting.add(victim)
    state.totals.preemptions += 1
    state.set_wait_reason(victim, WaitReason.PREEMPTION)
    state.recorder.on_preempted(victim.request_id, cause, beneficiary, state.now)


def release_held(state: SchedulerState, request: Request) -> None:
    """Take the blocks of a waiting request whose load has ended; it starts from nothing when its turn comes."""
    state.holding.remove(request)
    state.kv.free(request.request_id, state.get_fence(request))
    request.num_computed_tokens = 0
    request.num_committed_tokens = 0
    request.num_external_tokens = 0
    request.num_slots = 0
    state.waiting.add(request)


def make_room(
    state: SchedulerState, request: Request, num_tokens: int, num_lookahead: int
) -> tuple[int, BlockIds] | None:
    """Give a running request slots, preempting the least urgent ones as needed.

    Returns:
        Tokens granted (fewer than asked only when a window leaves no other way) and the new block ids; ``None`` when
        the request cannot run in this step, because blocks come back with a step in flight or because it was itself
        the least urgent.
    """
    kv = state.kv
    while True:
        block_ids = kv.allocate_slots(request, num_tokens, num_lookahead_tokens=num_lookahead)
        if block_ids is not None:
            return num_tokens, block_ids
        if kv.has_fenced:
            return None
        victim = state.running[-1]
        if victim is request:
            if request.num_in_flight:
                return None
            # A long chunk can ask for more than a window keeps; a block at a time always fits.
            if kv.coordinator.windowed and num_tokens > kv.block_size:
                num_tokens = kv.block_size
                continue
        preempt(state, victim, request.request_id, WaitReason.NO_BLOCKS)
        if victim is request:
            return None
