"""One attempt to let a waiting request run.

An `Admission` owns the attempt's tentative effects: the local hit it found, what the connector offered, the blocks it
took. Looking changes nothing, blocks are taken all or none, and if anything fails after that, `_undo` gives them back.
"""

from __future__ import annotations

from headrace.control.kv_cache.manager import ComputedBlocks
from headrace.control.scheduler.recorder import WaitReason
from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import SchedulerState
from headrace.kv_connector.protocol import ExternalHit
from headrace.messages.scheduler_output import BlockIds


class Admission:
    """One attempt for one request.

    Args:
        state: of the scheduler.
        request: from one of its waiting queues.
        max_tokens: most tokens that the step can grant it.
        reserved_blocks: free blocks that must remain for those who run.
        num_lookahead: slots for drafts.

    Attributes:
        num_tokens: granted when `attempt` returned ``None`` and the request now runs.
    """

    def __init__(
        self, state: SchedulerState, request: Request, max_tokens: int, reserved_blocks: int, num_lookahead: int
    ) -> None:
        self._state = state
        self._request = request
        self._max_tokens = max_tokens
        self._reserved = reserved_blocks
        self._lookahead = num_lookahead
        self._hit: ComputedBlocks | None = None
        self._external = ExternalHit(0)
        self.num_tokens = 0

    def attempt(self) -> WaitReason | None:
        """Admit the request, start its load, or say why it must wait; ``None`` means that it left its queue."""
        reason = self._check_ready() or self._find_hits()
        if reason is not None or self._request.ended:
            return reason
        if self._request.num_slots:
            return self._resume_loaded()
        if self._external.is_async and self._external.num_tokens:
            return self._start_load()
        return self._admit()

    def _check_ready(self) -> WaitReason | None:
        state, request = self._state, self._request
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            if not state.grammar.is_ready(request.request_id):
                return WaitReason.GRAMMAR
            error = state.grammar.get_error(request.request_id)
            if error is not None:
                state.fail(request, error)
                return None
            request.move(RequestStatus.WAITING)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return WaitReason.REMOTE_KVS
        # Its next token may depend on tokens that are still being sampled.
        return WaitReason.STEPS_IN_FLIGHT if request.num_in_flight else None

    def _find_hits(self) -> WaitReason | None:
        """Look for a local hit, then for an external one beyond it; the last token is always computed."""
        request = self._request
        if request.ended or request.num_slots:
            return None
        self._hit = self._state.kv.get_computed_blocks(request)
        if request.takes_hits and not request.no_external_hit:
            local = self._hit.num_tokens
            external = self._state.connector.get_external_hit(request.record, request.num_tokens, local)
            if external is None:
                return WaitReason.EXTERNAL_HIT
            usable = max(0, min(external.num_tokens, request.num_tokens - 1 - local))
            self._external = ExternalHit(usable, external.is_async, external.lease_s)
        return None

    def _resume_loaded(self) -> WaitReason | None:
        """A loaded request holds the blocks of its whole sequence: only the budget can stop it."""
        request = self._request
        num_tokens = min(request.num_tokens - request.num_computed_tokens, self._max_tokens)
        if num_tokens <= 0:
            return WaitReason.TOKEN_BUDGET
        self._state.holding.remove(request)
        external = request.num_external_tokens
        self._run(num_tokens, request.num_computed_tokens - external, external)
        return None

    def _start_load(self) -> WaitReason | None:
        """Take the blocks of the whole sequence, so that the request needs nothing more to run when they are filled."""
        state, request = self._state, self._request
        assert self._hit is not None
        local, external = self._hit.num_tokens, self._external.num_tokens
        if self._allocate(request.num_tokens - local - external) is None:
            return WaitReason.NO_BLOCKS
        state.waiting.remove(request)
        request.num_computed_tokens = local
        request.num_committed_tokens = local
        request.num_external_tokens = external
        request.deadline = state.now + self._external.lease_s
        request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
        state.holding.add(request)
        state.set_wait_reason(request, WaitReason.REMOTE_KVS)
        return None

    def _admit(self) -> WaitReason | None:
        state, request = self._state, self._request
        assert self._hit is not None
        local, external = self._hit.num_tokens, self._external.num_tokens
        num_tokens = min(request.num_tokens - local - external, self._max_tokens)
        if num_tokens <= 0:
            return WaitReason.TOKEN_BUDGET
        if self._allocate(num_tokens) is None:
            if len(state.running) or not state.kv.coordinator.windowed:
                return WaitReason.NO_BLOCKS
            # A long chunk can ask for more than a window keeps; a block at a time always fits.
            num_tokens = min(num_tokens, state.kv.block_size)
            if self._allocate(num_tokens) is None:
                return WaitReason.NO_BLOCKS
        state.waiting.remove(request)
        request.num_computed_tokens = local + external
        request.num_committed_tokens = local
        request.num_external_tokens = external
        request.loads_in_step = external > 0
        self._run(num_tokens, local, external)
        return None

    def _allocate(self, num_tokens: int) -> BlockIds | None:
        state, request = self._state, self._request
        assert self._hit is not None
        local, external = self._hit.num_tokens, self._external.num_tokens
        block_ids = state.kv.allocate_slots(
            request,
            num_tokens,
            hit=self._hit,
            num_external_tokens=external,
            num_lookahead_tokens=self._lookahead,
            whole_tokens=request.num_tokens,
            reserved_blocks=self._reserved,
        )
        if block_ids is None:
            return None
        try:
            table = state.kv.get_block_ids(request.request_id)
            state.connector.on_allocated(request.record, table, local, local + external)
        except BaseException:
            self._undo()
            raise
        request.num_slots = state.kv.num_slots(request.request_id)
        return block_ids

    def _undo(self) -> None:
        self._state.kv.free(self._request.request_id)
        self._request.num_slots = 0

    def _run(self, num_tokens: int, local: int, external: int) -> None:
        state, request = self._state, self._request
        resumed = request.admitted_before
        if resumed:
            state.kv.record_recompute(max(0, request.num_lost_tokens - local - external))
            request.num_lost_tokens = 0
        else:
            # Hits are counted here alone: what a preempted request finds again is its own work, not a hit.
            if request.takes_hits and state.kv.enable_prefix_caching:
                state.kv.record_admission(request.num_tokens, local)
            if request.takes_hits and state.has_connector:
                state.kv.record_external(request.num_tokens - local, external)
            request.num_cached_tokens = local + external
            request.admitted_before = True
            request.first_scheduled = state.now
        # A preempted request that was loaded is WAITING here: its history is in ``admitted_before``.
        request.move(RequestStatus.RUNNING)
        request.deadline = None
        request.wait_reason = None
        state.running.add(request)
        if request is state.blocked_head:
            state.blocked_head = None
        self.num_tokens = num_tokens
        hashes, index = request.hash_chain.hashes, local // state.kv.block_size
        missed = hashes[index] if request.takes_hits and index < len(hashes) else None
        state.recorder.on_admitted(request.request_id, local, external, missed, resumed, state.now)
