"""What must hold between any two calls of the scheduler."""

from __future__ import annotations

from headrace.control.scheduler.request import RequestStatus
from headrace.control.scheduler.state import SchedulerState

_WITHOUT_BLOCKS = {RequestStatus.WAITING, RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.PREEMPTED}
_HOLDING = {RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS}


def check(state: SchedulerState) -> None:
    """Raise ``AssertionError`` unless queues, requests, steps in flight and blocks agree."""
    _check_queues(state)
    _check_requests(state)
    _check_steps(state)
    state.kv.check_invariants()


def _check_queues(state: SchedulerState) -> None:
    queues = (state.running, state.waiting, state.holding)
    queued = [request for queue in queues for request in queue]
    assert len(queued) == len(state.requests), "a request stands in two queues or in none"
    assert {r.request_id for r in queued} == set(state.requests)
    assert all(r.status is RequestStatus.RUNNING for r in state.running)
    assert all(r.status in _WITHOUT_BLOCKS for r in state.waiting)
    assert all(r.status in _HOLDING for r in state.holding)
    assert len(state.running) <= state.section.max_num_seqs
    policy = state.running.policy
    for queue in queues:
        keys = [policy.key(request) for request in queue]
        assert keys == sorted(keys), "a queue is out of order"
    tables = set(state.kv.coordinator.groups[0].tables)
    assert tables == {r.request_id for q in (state.running, state.holding) for r in q}, "blocks without a holder"


def _check_requests(state: SchedulerState) -> None:
    for request in state.requests.values():
        computed, known = request.num_computed_tokens, request.num_tokens
        assert 0 <= request.num_committed_tokens <= computed, request
        assert computed <= known + request.num_output_placeholders + request.num_draft_placeholders, request
        assert known <= request.max_total_tokens, request
        assert computed < request.max_total_tokens, request
        assert request.num_slots == state.kv.num_slots(request.request_id), request
        assert computed <= max(request.num_slots, 0), request
        assert request.hash_chain.block_size * len(request.hash_chain.hashes) <= known, "a placeholder was hashed"


def _check_steps(state: SchedulerState) -> None:
    ids = [step.step_id for step in state.in_flight]
    assert ids == sorted(set(ids))
    for request in state.requests.values():
        entries = [(step.step_id, entry) for step in state.in_flight for entry in step.entries if entry[0] is request]
        assert request.num_in_flight == len(entries), request
        live = [entry for step_id, entry in entries if step_id > request.discard_until]
        assert request.num_output_placeholders == sum(samples for _, _, _, samples, _ in live), request
        assert request.num_draft_placeholders == sum(num_drafts for *_, num_drafts in live), request
        if request.status is RequestStatus.PREEMPTED:
            assert request.num_computed_tokens == 0, request
