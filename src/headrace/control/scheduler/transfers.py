"""KV that moves: loads that end or fail, blocks that turned out invalid, blocks kept for readers, deadlines."""

from __future__ import annotations

from headrace.control.scheduler.preemption import preempt, release_held
from headrace.control.scheduler.recorder import WaitReason
from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import SchedulerState
from headrace.messages.runner_output import ConnectorOutput


def apply_connector_output(state: SchedulerState, output: ConnectorOutput) -> None:
    """Act on what the worker side learnt. Reports about requests that are gone only end their leases."""
    for request_id in output.failed_receiving:
        _end_load(state, request_id, failed=True)
    for request_id in output.finished_receiving:
        _end_load(state, request_id, failed=False)
    for request_id in output.finished_sending:
        state.end_lease(request_id)
    if output.invalid_block_ids:
        _handle_invalid_blocks(state, frozenset(output.invalid_block_ids))
    state.connector.on_output(output)


def expire(state: SchedulerState) -> None:
    """Give up transfers whose time is over, so that no wait on another party is without end.

    Steps in flight were sent before the other side hears of it: they are a fence for the blocks.
    """
    now = state.now
    fence = state.in_flight[-1].step_id if state.in_flight else None
    for request in [r for r in state.holding if r.deadline is not None and r.deadline <= now]:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            state.connector.on_expired(request.request_id)
            _fail_load(state, request, "no report from the KV transfer in time", fence)
    for request_id in [key for key, lease in state.leases.items() if lease.deadline <= now]:
        state.connector.on_expired(request_id)
        del state.leases[request_id]
        state.kv.end_lease(request_id, fence)


def _end_load(state: SchedulerState, request_id: str, *, failed: bool) -> None:
    request = state.requests.get(request_id)
    if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        state.end_lease(request_id)
        return
    if failed:
        _fail_load(state, request, "the KV transfer failed")
        return
    request.num_computed_tokens += request.num_external_tokens
    request.num_committed_tokens = request.num_computed_tokens
    state.kv.cache_committed(request, request.num_computed_tokens)
    request.deadline = None
    request.move(RequestStatus.WAITING)


def _fail_load(state: SchedulerState, request: Request, error: str, fence: int | None = None) -> None:
    """The transfer is over: the request ends, or computes everything itself."""
    request.move(RequestStatus.WAITING)
    request.deadline = None
    state.kv.free(request.request_id, fence)
    request.num_slots = 0
    if state.connector.load_failure_policy == "fail":
        state.fail(request, error)
        return
    request.no_external_hit = True
    release_held(state, request)


def _handle_invalid_blocks(state: SchedulerState, block_ids: frozenset[int]) -> None:
    """Lower every request that has one of the blocks, sharers too, to the last block before it."""
    for request in [*state.running, *state.holding]:
        index = state.kv.first_block_among(request.request_id, block_ids)
        if index is None or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        if request.num_computed_tokens <= index * state.kv.block_size:
            continue
        if state.connector.load_failure_policy == "fail":
            state.kv.invalidate(request.request_id, index)
            state.fail(request, "the KV transfer delivered invalid blocks")
        else:
            _lower(state, request, index)
    state.kv.evict(sorted(block_ids))


def _lower(state: SchedulerState, request: Request, num_valid_blocks: int) -> None:
    can_go_on = state.kv.invalidate(request.request_id, num_valid_blocks)
    request.no_external_hit = True
    request.loads_in_step = False
    request.num_cached_tokens = min(request.num_cached_tokens, num_valid_blocks * state.kv.block_size)
    if request.status is not RequestStatus.RUNNING:
        release_held(state, request)
    elif can_go_on:
        request.restart(num_valid_blocks * state.kv.block_size)
    else:
        preempt(state, request, request.request_id, WaitReason.REMOTE_KVS, drop=True)
