"""`Scheduler`: decides what each step runs, and commits what came of it.

There is no prefill or decode phase: a step grants tokens so that ``num_computed_tokens`` catches up with the tokens
that there are. `schedule` decides and returns; others act. The scheduler has no clock and does no I/O.

A step: `running_pass` (most urgent first), then `waiting_pass` when nobody had to give up blocks, then the record is
built, and only then do computed counts advance. Several steps may be in flight; they are committed in order by
`update_from_output`, or taken back by `rewind`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import SchedulerSection
from headrace.control.grammar.null import NullGrammar
from headrace.control.grammar.protocol import Grammar
from headrace.control.kv_cache.events import EventSink
from headrace.control.kv_cache.manager import KVCacheManager
from headrace.control.scheduler import invariants, transfers
from headrace.control.scheduler.passes import ensure_progress, running_pass, waiting_pass
from headrace.control.scheduler.plan import advance, build_output, make_plan
from headrace.control.scheduler.preemption import preempt, release_held
from headrace.control.scheduler.recorder import NullStepRecorder, StepRecorder, WaitReason
from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import SchedulerState
from headrace.control.scheduler.update import commit_step
from headrace.kv_connector.null import NullConnector
from headrace.kv_connector.protocol import SchedulerConnector
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput


class Scheduler:
    """See the module.

    Args:
        section: limits and policy, resolved.
        kv: the plan of KV blocks.
        max_model_len: most tokens of a request, prompt and output.
        enable_prefix_caching: whether equal prefixes share blocks.
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
        max_batched = section.max_num_batched_tokens
        self._state = SchedulerState(
            section=section,
            kv=self.kv,
            connector=connector if connector is not None else NullConnector(),
            grammar=grammar if grammar is not None else NullGrammar(),
            recorder=recorder if recorder is not None else NullStepRecorder(),
            max_model_len=max_model_len,
            num_draft_tokens=num_draft_tokens,
            max_tokens=min(section.max_num_scheduled_tokens or max_batched, max_batched),
            watermark_blocks=int(section.watermark * self.kv.pool.num_usable),
            has_connector=connector is not None,
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
        if not self.kv.fits_alone(request.max_total_tokens + state.num_draft_tokens):
            raise InvalidRequestError("the request needs more KV blocks than there are", param="prompt")
        state.next_rank += 1
        if self.kv.enable_prefix_caching:
            request.hash_chain.extend(request.token_ids, num_prompt)
        if request.uses_grammar:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            state.grammar.start(record)
        state.requests[record.request_id] = request
        state.waiting.add(request)
        state.recorder.on_queued(record, request.hash_chain, now)

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
        plan = make_plan(state, throttle_prefills)
        running_pass(state, plan, only)
        if plan.defer_prompts and not plan.entries:
            # No stream could go on: there is nobody to spare.
            plan.defer_prompts = False
            running_pass(state, plan, only)
        if only is not None:
            state.head_reason = WaitReason.DRAIN
        elif not plan.short_of_blocks:
            waiting_pass(state, plan)
            ensure_progress(state, plan)
        metadata = state.connector.make_metadata()
        output = build_output(state, plan, metadata)
        if plan.entries or metadata is not None:
            advance(state, plan, output)
        return output

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
        for request in dict.fromkeys(entry[0] for entry in entries):
            if request.status is RequestStatus.RUNNING and request.num_committed_tokens < request.num_computed_tokens:
                # Admitted in a dropped step with an external hit that nobody may have loaded. It computes everything
                # itself next time, so that a step which fails again can be run in parts, this request included.
                request.no_external_hit = True
                preempt(state, request, request.request_id, WaitReason.EXTERNAL_HIT, drop=True)
        # The runner may not have heard of rows that ended.
        state.ended_rows = [i for taken_back in dropped for i in taken_back.finished] + state.ended_rows
        state.preempted_rows = [i for taken_back in dropped for i in taken_back.preempted] + state.preempted_rows
        self.kv.release_fenced(last_step)
        return [entry[0].request_id for entry in failed if entry[0].status is RequestStatus.RUNNING]

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Forget all hashes. ``False``, leaving them, while requests or transfers hold blocks.

        Args:
            reset_running: preempt them first; tokens of steps in flight are dropped, for they come from the old cache.
        """
        state = self._state
        if reset_running:
            for request in reversed(list(state.running)):
                preempt(state, request, request.request_id, WaitReason.DRAIN, drop=True)
            for request in list(state.holding):
                if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                    release_held(state, request)
        return self.kv.reset_prefix_cache()

    def hold_waiting(self, now: float) -> None:
        """Nothing will be scheduled for a while: note that this is why requests wait. Decides nothing."""
        state = self._state
        state.now, state.head_reason = now, WaitReason.DRAIN
        for request in [*state.holding, *state.waiting]:
            state.set_wait_reason(request, WaitReason.DRAIN)

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

    def make_stats(self) -> SchedulerStats:
        """Live state and totals, read when asked."""
        state, stats, totals = self._state, self.kv.stats, self._state.totals
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_queued_tokens=self.num_queued_tokens,
            kv_cache_usage=self.kv.usage,
            num_preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            num_corrupted=totals.corrupted,
            num_watermark_admitted=totals.watermark_admitted,
            num_watermark_held=totals.watermark_held,
            prefix_queries=stats.queries,
            prefix_hits=stats.hits,
            external_queries=stats.external_queries,
            external_hits=stats.external_hits,
            recompute_tokens=stats.recompute_tokens,
            waiting_reasons=self._count_reasons(),
            running_adapters=_adapters_of(state.running),
            waiting_adapters=_adapters_of(state.waiting),
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


def _adapters_of(requests: Iterable[Request]) -> list[str]:
    return sorted({r.record.lora_name for r in requests if r.record.lora_name is not None})
