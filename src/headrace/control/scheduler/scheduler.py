"""`Scheduler`: decides what each step runs, and commits what came of it.

There is no prefill or decode phase: a step grants tokens so that ``num_computed_tokens`` catches up with the tokens
that there are. `schedule` decides and returns; others act. The scheduler has no clock and does no I/O.

A step: `_running_pass` (most urgent first), then `_waiting_pass` when nobody had to give up blocks, then the record is
built, and only then do computed counts advance. Several steps may be in flight; they are committed in order by
`update_from_output`, or taken back by `rewind`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import SchedulerSection
from headrace.control.grammar.null import NullGrammar
from headrace.control.grammar.protocol import Grammar
from headrace.control.kv_cache.events import EventSink
from headrace.control.kv_cache.manager import KVCacheManager
from headrace.control.scheduler import invariants, transfers
from headrace.control.scheduler.admission import Admission
from headrace.control.scheduler.budget import StepBudget
from headrace.control.scheduler.preemption import make_room, preempt, release_held
from headrace.control.scheduler.recorder import NullStepRecorder, StepRecorder, WaitReason
from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import Entry, InFlightStep, SchedulerState
from headrace.control.scheduler.update import commit_step
from headrace.kv_connector.null import NullConnector
from headrace.kv_connector.protocol import SchedulerConnector
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import BlockIds, CachedRequests, KVActions, NewRequest, SchedulerOutput

# Beyond a head that does not fit, this many requests are tried in a step: a long queue must not cost a long look.
_MAX_TRIED_BEHIND_HEAD = 4

# Waits of unknown length, during which others may pass. A preempted request that waits for its own steps in flight is
# not among them: others would take the blocks that it gave up.
_STEP_ASIDE = frozenset({WaitReason.GRAMMAR, WaitReason.REMOTE_KVS, WaitReason.EXTERNAL_HIT})


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    budget: StepBudget
    prompt_limit: int
    defer_prompts: bool
    entries: list[Entry] = field(default_factory=list)
    new_block_ids: dict[str, BlockIds] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    short_of_blocks: bool = False


class Scheduler:
    """See the module.

    Args:
        section: limits and policy, resolved.
        kv: the plan of KV blocks.
        max_model_len: most tokens of a request, prompt and output.
        enable_prefix_caching: whether equal prefixes share blocks.
        pipeline_depth: most steps in flight.
        connector, grammar, recorder, events: parts that do nothing by default.
        num_draft_tokens: drafts per request that the drafter may propose.
    """

    def __init__(
        self,
        section: SchedulerSection,
        kv: KVCacheConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool,
        pipeline_depth: int,
        connector: SchedulerConnector | None = None,
        grammar: Grammar | None = None,
        recorder: StepRecorder | None = None,
        events: EventSink | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        assert section.max_num_seqs > 0 and section.max_num_batched_tokens > 0, section
        self.kv = KVCacheManager(
            kv, max_model_len=max_model_len, enable_prefix_caching=enable_prefix_caching, events=events
        )
        self._section = section
        self._pipeline_depth = pipeline_depth
        self._num_draft_tokens = num_draft_tokens
        self._max_tokens = min(
            section.max_num_scheduled_tokens or section.max_num_batched_tokens, section.max_num_batched_tokens
        )
        self._watermark_blocks = int(section.watermark * self.kv.pool.num_usable)
        self._state = SchedulerState(
            section=section,
            kv=self.kv,
            connector=connector if connector is not None else NullConnector(),
            grammar=grammar if grammar is not None else NullGrammar(),
            recorder=recorder if recorder is not None else NullStepRecorder(),
            max_model_len=max_model_len,
        )

    # Requests in and out

    def add_request(self, record: EngineCoreRequest, now: float) -> None:
        """Queue a request and hash its prompt.

        Raises:
            InvalidRequestError: it can never run here: empty, too long for the context or the cache, or its id is in
                use. The edge refuses all of these; an engine that met one anyway must not stall.
        """
        state = self._state
        state.now = now
        num_prompt, sampling = len(record.prompt_token_ids), record.sampling
        if record.request_id in state.requests or record.request_id in state.leases:
            raise InvalidRequestError(f"request id {record.request_id} is in use", param="request_id")
        if not num_prompt or num_prompt + (sampling.max_tokens != 0) > state.max_model_len:
            raise InvalidRequestError(f"the prompt must have 1 to {state.max_model_len - 1} tokens", param="prompt")
        request = Request(
            record,
            rank=state.next_rank,
            now=now,
            max_model_len=state.max_model_len,
            block_size=self.kv.block_size,
        )
        if not self.kv.fits_alone(request.max_total_tokens + self._num_draft_tokens):
            raise InvalidRequestError("the request needs more KV blocks than there are", param="prompt")
        state.next_rank += 1
        if self.kv.enable_prefix_caching:
            request.hash_chain.extend(request.token_ids, num_prompt)
        if request.uses_grammar:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            state.grammar.start(record)
        state.requests[record.request_id] = request
        state.waiting.add(request)
        state.recorder.on_queued(record.request_id, num_prompt, now)

    def finish_requests(
        self, ids: Iterable[str] | None, reason: FinishReason, error: str | None = None
    ) -> dict[int, list[EngineCoreOutput]]:
        """End requests (``None``: all) and return their last outputs by client. Unknown and ended ids are ignored."""
        state = self._state
        outputs: dict[int, list[EngineCoreOutput]] = {}
        for request_id in list(state.requests) if ids is None else ids:
            request = state.requests.get(request_id)
            if request is None:
                continue
            if reason not in (FinishReason.ABORT, FinishReason.ERROR):
                raise ValueError(f"a request cannot be ended from outside with {reason.value}")
            output = state.end_with_output(request, reason, error)
            outputs.setdefault(request.record.client_index, []).append(output)
        return outputs

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """Outputs that came about outside a commit: requests that `schedule` had to fail. Call it after `schedule`."""
        outbox, self._state.outbox = self._state.outbox, {}
        return {client: EngineCoreOutputs(outputs=outputs) for client, outputs in outbox.items()}

    # A step

    def schedule(
        self, now: float, throttle_prefills: bool = False, only: Collection[str] | None = None
    ) -> SchedulerOutput:
        """Decide the next step.

        Args:
            now: time of the decision.
            throttle_prefills: leave prompts for a later step while streams run.
            only: grant to these running requests alone and admit nobody (to run a failed step again in parts).

        Returns:
            The step. One with no tokens and no connector metadata is not to be executed and counts as not scheduled:
            wait for a step in flight, a grammar or a transfer.
        """
        state = self._state
        state.now = now
        transfers.expire(state)
        plan = self._make_plan(throttle_prefills)
        self._running_pass(plan, only)
        if only is None and not plan.short_of_blocks:
            self._waiting_pass(plan)
            self._ensure_progress(plan)
        metadata = state.connector.make_metadata()
        output = self._build_output(plan, metadata)
        if plan.entries or metadata is not None:
            self._advance(plan, output)
        return output

    def _make_plan(self, throttle_prefills: bool) -> _Plan:
        state, section = self._state, self._section
        running = state.running.requests
        budget = StepBudget(self._max_tokens, section.max_num_batched_tokens, self._num_draft_tokens, self._max_tokens)
        has_streams = False
        if throttle_prefills or section.max_token_gap_ms > 0.0:
            has_streams = any(r.num_computed_tokens >= r.num_prompt_tokens for r in running)
        if section.max_token_gap_ms > 0.0 and has_streams:
            share = state.cost.max_prompt_tokens(section.max_token_gap_ms / 1e3, self.kv.block_size)
            budget.prompt = min(budget.prompt, share)
        return _Plan(budget, self._get_prompt_limit(budget), throttle_prefills and has_streams)

    def _get_prompt_limit(self, budget: StepBudget) -> int:
        """Most tokens of one prompt in this step: the threshold, or an equal share when several would exceed it."""
        state, threshold = self._state, self._section.long_prefill_token_threshold
        running = state.running.requests
        if threshold <= 0 or len(state.requests) < 2:
            return budget.prompt
        num_prompts = sum(r.num_computed_tokens < r.num_prompt_tokens for r in running)
        num_claims = num_prompts + (len(running) < self._section.max_num_seqs and len(state.waiting) > 0)
        room = min(budget.prompt, budget.room - (len(running) - num_prompts))
        return min(threshold, max(self.kv.block_size, room // max(1, num_claims)))

    def _running_pass(self, plan: _Plan, only: Collection[str] | None) -> None:
        """Grant to running requests, most urgent first. Preemption takes from the end of the list as it is walked."""
        running, budget, entries = self._state.running.requests, plan.budget, plan.entries
        lookahead = self._num_draft_tokens
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            computed = request.num_computed_tokens
            num_drafts = len(request.spec_token_ids)
            known = len(request.token_ids) + request.num_output_placeholders + num_drafts
            num_tokens = min(known, request.max_total_tokens - 1) - computed
            if (
                num_tokens <= 0
                or request.num_draft_placeholders
                or (only is not None and request.request_id not in only)
            ):
                continue
            is_prompt = num_tokens > 1 + num_drafts
            if is_prompt:
                num_tokens = self._shorten(plan, num_tokens, len(running) - index)
            room = budget.room
            if num_tokens > room:
                num_tokens = room
            if num_tokens <= 0:
                if room <= 0:
                    break
                continue
            if computed + num_tokens + lookahead > request.num_slots:
                num_tokens = self._grow(plan, request, num_tokens)
                if not num_tokens:
                    continue
            if is_prompt:
                budget.prompt -= num_tokens
                plan.num_prompt_tokens += num_tokens
            budget.tokens -= num_tokens
            budget.inputs -= num_tokens + budget.draft_slots
            end = computed + num_tokens
            # Drafts stand last: a grant that was cut short has fewer of them.
            cut = known - end
            entries.append(Entry(request, num_tokens, end, cut <= num_drafts, max(0, num_drafts - cut)))

    def _shorten(self, plan: _Plan, num_tokens: int, num_later: int) -> int:
        """Cut a prompt's chunk so that every later running request still gets a token: prompts fill, streams flow."""
        if plan.defer_prompts:
            return 0
        left_for_others = plan.budget.room - num_later * (1 + plan.budget.draft_slots)
        return min(num_tokens, plan.prompt_limit, plan.budget.prompt, max(1, left_for_others))

    def _grow(self, plan: _Plan, request: Request, num_tokens: int) -> int:
        """Take blocks for a running request; returns the tokens it can have."""
        room = self._state.max_model_len - request.num_computed_tokens - num_tokens
        lookahead = min(self._num_draft_tokens, room)
        num_preempted = self._state.totals.preemptions
        grown = make_room(self._state, request, num_tokens, lookahead)
        if grown is None or self._state.totals.preemptions > num_preempted:
            plan.short_of_blocks = True
        if grown is None:
            return 0
        num_tokens, block_ids = grown
        request.num_slots = self.kv.num_slots(request.request_id)
        if any(block_ids):
            plan.new_block_ids[request.request_id] = block_ids
        return num_tokens

    # Waiting requests

    def _waiting_pass(self, plan: _Plan) -> None:
        """Admit those that hold blocks already, then the queue in its order."""
        state = self._state
        if not len(state.waiting) and not len(state.holding):
            return
        state.head_reason = None
        if plan.defer_prompts:
            state.head_reason = WaitReason.THROTTLED
            return
        for queue in (state.holding, state.waiting):
            self._admit_from(queue.requests, plan)

    def _admit_from(self, queue: list[Request], plan: _Plan) -> None:
        state = self._state
        outstanding: int | None = None
        blocked: Request | None = None
        num_tried_behind = 0
        passed = False
        index = 0
        while index < len(queue):
            request = queue[index]
            reason = self._find_limit(plan)
            if reason is None:
                if outstanding is None:
                    outstanding = sum(map(self._count_outstanding, state.running))
                # Nothing is reserved when nothing runs: what fits alone is then always admitted.
                reserved = outstanding + self._watermark_blocks if len(state.running) else 0
                reason = self._try_admit(request, plan, reserved)
                if reason is None:
                    passed = passed or blocked is not None
                    outstanding += self._count_outstanding(request)
                    continue
            state.set_wait_reason(request, reason)
            state.head_reason = state.head_reason or reason
            if reason in _STEP_ASIDE:
                index += 1
                continue
            if reason is not WaitReason.NO_BLOCKS:
                break
            if blocked is None:
                blocked = request
                self._note_blocked(request)
            num_tried_behind += 1
            if (
                num_tried_behind > _MAX_TRIED_BEHIND_HEAD
                or state.num_bypass_steps >= self._section.max_head_bypass_steps
            ):
                break
            index += 1
        if passed:
            state.num_bypass_steps += 1

    def _note_blocked(self, request: Request) -> None:
        if self._state.blocked_head is not request:
            self._state.blocked_head = request
            self._state.num_bypass_steps = 0

    def _find_limit(self, plan: _Plan) -> WaitReason | None:
        if len(self._state.running) >= self._section.max_num_seqs:
            return WaitReason.RUNNING_LIMIT
        if plan.budget.tokens <= 0 or plan.budget.prompt <= 0:
            return WaitReason.TOKEN_BUDGET
        return WaitReason.INPUT_BUDGET if plan.budget.room <= 0 else None

    def _count_outstanding(self, request: Request) -> int:
        """Blocks that a running request's known tokens still need: an admission must leave them."""
        if request.num_tokens <= request.num_slots or request.status is not RequestStatus.RUNNING:
            return 0
        return self.kv.num_blocks_of_whole(request.request_id, request.num_tokens)

    def _try_admit(self, request: Request, plan: _Plan, reserved: int) -> WaitReason | None:
        budget = plan.budget
        limit = min(budget.room, budget.prompt, plan.prompt_limit)
        admission = Admission(self._state, request, limit, reserved, self._num_draft_tokens)
        reason = admission.attempt()
        if reason is None and admission.num_tokens:
            num_tokens = admission.num_tokens
            budget.charge(num_tokens)
            budget.prompt -= num_tokens
            plan.num_prompt_tokens += num_tokens
            end = request.num_computed_tokens + num_tokens
            plan.entries.append(Entry(request, num_tokens, end, end == request.num_tokens, 0))
        return reason

    def _ensure_progress(self, plan: _Plan) -> None:
        """The rule against silent stalls: ready requests, nothing in flight or pending, and nothing ran.

        Those that hold blocks without running give them up, least urgent first; when there is nobody left to take
        from, the head fails rather than wait for ever.
        """
        state = self._state
        if plan.entries or state.in_flight or state.leases or plan.defer_prompts:
            return
        if any(r.status is RequestStatus.WAITING_FOR_REMOTE_KVS for r in state.holding):
            return
        head = next((r for r in [*state.holding, *state.waiting] if r.wait_reason is WaitReason.NO_BLOCKS), None)
        if head is None:
            return
        others = [r for r in state.holding if r is not head]
        if others:
            release_held(state, others[-1])
        else:
            state.fail(head, "the engine cannot make room for this request")

    # Building

    def _build_output(self, plan: _Plan, metadata: bytes | None) -> SchedulerOutput:
        """The step as a record. A request without a valid row is sent whole; if it has a stale one, that ends first."""
        state = self._state
        new: list[NewRequest] = []
        cached: list[Request] = []
        for entry in plan.entries:
            request = entry.request
            if request.needs_row:
                if request.has_row:
                    state.preempted_rows.append(request.request_id)
                new.append(self._make_new(request))
            else:
                cached.append(request)
        for record in new:
            plan.new_block_ids.pop(record.request_id, None)
        executed = bool(plan.entries) or metadata is not None
        return SchedulerOutput(
            step_id=state.next_step_id,
            new=new,
            cached=CachedRequests(
                request_ids=[r.request_id for r in cached],
                num_computed_tokens=[r.num_computed_tokens for r in cached],
                new_block_ids=plan.new_block_ids,
            ),
            num_scheduled_tokens={entry[0].request_id: entry[1] for entry in plan.entries},
            total_num_scheduled_tokens=self._max_tokens - plan.budget.tokens,
            finished=state.ended_rows if executed else [],
            preempted=state.preempted_rows if executed else [],
            kv=KVActions(zero=[], copy=[]),
            spec={e.request.request_id: e.request.spec_token_ids[: e.num_drafts] for e in plan.entries if e.num_drafts},
            grammar=[e.request.request_id for e in plan.entries if e.request.uses_grammar and e.samples],
            encoder={},
            connector=metadata,
        )

    def _make_new(self, request: Request) -> NewRequest:
        record = request.record
        return NewRequest(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=self.kv.get_block_ids(request.request_id),
            sampling=record.sampling,
            eos_token_ids=record.eos_token_ids,
            bad_words_token_ids=record.bad_words_token_ids,
            lora_name=record.lora_name,
            fault=record.fault,
        )

    def _advance(self, plan: _Plan, output: SchedulerOutput) -> None:
        """The step is in flight: counts advance, sampled tokens become placeholders."""
        state, step_id = self._state, output.step_id
        for request, _, end, samples, num_drafts in plan.entries:
            request.num_computed_tokens = end
            request.num_in_flight += 1
            request.last_step = step_id
            if samples:
                request.num_output_placeholders += 1
                if num_drafts:
                    request.num_draft_placeholders += num_drafts
                request.spec_token_ids = []
        for record in output.new:
            request = state.requests[record.request_id]
            request.has_row, request.needs_row = True, False
        state.in_flight.append(
            InFlightStep(step_id, plan.entries, output.finished, output.preempted, plan.num_prompt_tokens, state.now)
        )
        state.ended_rows, state.preempted_rows = [], []
        state.next_step_id += 1
        state.recorder.on_step(output, state.take_block_counts(), len(state.running), self.num_waiting, state.now)

    # Commit and rewind

    def update_from_output(
        self, step: SchedulerOutput, runner_output: ModelRunnerOutput, now: float
    ) -> dict[int, EngineCoreOutputs]:
        """Commit the oldest step in flight and return what its clients must hear."""
        state = self._state
        state.now = now
        oldest = state.in_flight.popleft()
        assert oldest.step_id == step.step_id, f"step {step.step_id} committed before step {oldest.step_id}"
        commit_step(state, oldest, runner_output)
        state.recorder.on_committed(oldest.step_id, state.take_block_counts(), now)
        return self.take_outputs()

    def rewind(self, step: SchedulerOutput) -> list[str]:
        """Take back the oldest step in flight, which failed, and all younger ones; none of them may still run.

        Every live request of these steps goes on from its last committed step and is sent whole the next time, so a
        half-applied step leaves nothing behind. Run the returned requests again with ``schedule(now, only=…)``.

        Returns:
            Ids of the failed step that are still running, in its order.
        """
        state = self._state
        assert state.in_flight and state.in_flight[0].step_id == step.step_id, "only the oldest step can have failed"
        failed = state.in_flight[0].entries
        dropped, last_step = list(state.in_flight), state.in_flight[-1].step_id
        state.in_flight.clear()
        entries = [entry for taken_back in dropped for entry in taken_back.entries]
        for request, num_tokens, end, _, _ in entries:
            request.num_in_flight -= 1
            if not request.ended:
                request.restart(min(request.num_computed_tokens, max(0, end - num_tokens)))
        for request in dict.fromkeys(entry.request for entry in entries):
            if request.status is RequestStatus.RUNNING and request.num_committed_tokens < request.num_computed_tokens:
                # Admitted in a dropped step with an external hit that nobody may have loaded: it must be asked again.
                preempt(state, request, request.request_id, WaitReason.EXTERNAL_HIT, drop=True)
        # The runner may not have heard of rows that ended.
        state.ended_rows = [i for taken_back in dropped for i in taken_back.finished] + state.ended_rows
        state.preempted_rows = [i for taken_back in dropped for i in taken_back.preempted] + state.preempted_rows
        self.kv.release_fenced(last_step)
        return [e.request.request_id for e in failed if e.request.status is RequestStatus.RUNNING]

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Forget all hashes. ``False``, changing nothing, while requests hold blocks.

        Args:
            reset_running: preempt them first; tokens of steps in flight are dropped, for they come from the old cache.
        """
        state = self._state
        if reset_running:
            for request in reversed(list(state.running)):
                preempt(state, request, request.request_id, WaitReason.PREEMPTION, drop=True)
            for request in list(state.holding):
                if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                    release_held(state, request)
        return self.kv.reset_prefix_cache()

    # Looking

    @property
    def has_unfinished(self) -> bool:
        """Whether any request lives."""
        return bool(self._state.requests)

    @property
    def has_pending_transfers(self) -> bool:
        """Whether blocks wait for a transfer to report or to expire; `schedule` must go on being called."""
        state = self._state
        return bool(state.leases) or any(r.deadline is not None for r in state.holding)

    @property
    def num_in_flight(self) -> int:
        """Steps handed out and not committed."""
        return len(self._state.in_flight)

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones included."""
        return len(self._state.waiting) + len(self._state.holding)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that waiting requests have yet to compute."""
        state = self._state
        return sum(r.num_tokens - r.num_computed_tokens for q in (state.waiting, state.holding) for r in q)

    def has_ready_work(self) -> bool:
        """Whether `schedule` may find something to run now, given what is in flight."""
        state = self._state
        if len(state.in_flight) >= self._pipeline_depth:
            return False
        if any(r.num_to_compute() > 0 and not r.num_draft_placeholders for r in state.running):
            return True
        return any(self._may_be_admitted(r) for q in (state.holding, state.waiting) for r in q)

    def _may_be_admitted(self, request: Request) -> bool:
        if request.num_in_flight or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return False
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            return self._state.grammar.is_ready(request.request_id)
        return self.num_running < self._section.max_num_seqs

    def make_stats(self) -> SchedulerStats:
        """Live state and totals, read when asked."""
        state, stats = self._state, self.kv.stats
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_cache_usage=self.kv.usage,
            num_preemptions=state.totals.preemptions,
            prompt_tokens=state.totals.prompt_tokens,
            generation_tokens=state.totals.generation_tokens,
            prefix_queries=stats.queries,
            prefix_hits=stats.hits,
            recompute_tokens=stats.recompute_tokens,
            waiting_reasons=self._count_reasons(),
        )

    def _count_reasons(self) -> dict[str, int]:
        state = self._state
        shared = state.head_reason.value if state.head_reason is not None else WaitReason.TOKEN_BUDGET.value
        counts: dict[str, int] = {}
        for request in [*state.holding, *state.waiting]:
            reason = request.wait_reason.value if request.wait_reason is not None else shared
            counts[reason] = counts.get(reason, 0) + 1
        return counts

    def get_request(self, request_id: str) -> Request | None:
        """A live request, to look at."""
        return self._state.requests.get(request_id)

    def check_invariants(self) -> None:
        """Raise unless everything agrees; for tests and when idle."""
        invariants.check(self._state)
