"""A step in the making, and how it becomes a record.

A plan collects entries while the passes run; `build_output` writes them down for the executor; only then `advance`
moves the counts of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.control.scheduler.budget import StepBudget
from headrace.control.scheduler.recorder import WaitReason
from headrace.control.scheduler.request import Request
from headrace.control.scheduler.state import Entry, InFlightStep, SchedulerState
from headrace.messages.scheduler_output import BlockIds, CachedRequests, KVActions, NewRequest, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """What a step will run.

    Attributes:
        prompt_limit: most tokens of one prompt.
        num_sharers: prompts that have yet to get their part of the share that streams leave to prompts; 0 shares
            nothing out.
        defer_prompts: prompts get nothing in this step.
        short_of_blocks: a running request had to wait, or to take blocks from another one: nobody is admitted.
        ungranted: running requests that get nothing, and why.
    """

    budget: StepBudget
    prompt_limit: int
    defer_prompts: bool
    entries: list[Entry] = field(default_factory=list)
    new_block_ids: dict[str, BlockIds] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_sharers: int = 0
    short_of_blocks: bool = False
    ungranted: dict[str, WaitReason] = field(default_factory=dict)

    @property
    def prompt_room(self) -> int:
        """Most tokens that the next prompt may get."""
        return min(self.prompt_limit, -(-self.budget.prompt // max(1, self.num_sharers)))

    def take_prompt_tokens(self, num_tokens: int) -> None:
        """Count a prompt's chunk."""
        self.budget.prompt -= num_tokens
        self.num_prompt_tokens += num_tokens
        self.num_sharers -= 1


# While streams run, prompts advance by at least this much in a step, whatever it costs.
_LEAST_PROMPT_TOKENS = 4
# From this many streams to a waiting prompt on, the limits of gaps hold to the letter.
_STREAMS_PER_PROMPT = 4
# From this wait on, a prompt's part grows with its wait, up to a multiple.
_PATIENCE_S = 3.0
_MAX_WAIT_FACTOR = 2.5
# Tokens that follow each other as fast as this are read by nobody: there is no need to hold prompts back for less.
_UNFELT_GAP_S = 0.015
# A waiting prompt is short when it takes at most this part of a step.
_SHORT_SHARE = 4
# More prompts than this do not advance side by side: all of them would end late.
_MAX_SHARERS = 4


def make_plan(state: SchedulerState, throttle_prefills: bool) -> StepPlan:
    """An empty step with its budgets."""
    section, running = state.section, state.running.requests
    budget = StepBudget(state.max_tokens, section.max_num_batched_tokens, state.num_draft_tokens, state.max_tokens)
    has_gap_limit = section.max_token_gap_ms > 0.0 or bool(section.max_token_gap_factor)
    if not (throttle_prefills or has_gap_limit):
        return StepPlan(budget, _get_prompt_limit(state, budget), defer_prompts=False)
    prompts = [r for r in running if r.num_computed_tokens < r.num_prompt_tokens]
    num_streams = len(running) - len(prompts)
    num_sharers = 0
    if num_streams and has_gap_limit:
        num_waiting = len(prompts) + min(len(state.waiting), section.max_num_seqs - len(running))
        urgency = _find_urgency(state, prompts, num_waiting)
        budget.prompt = min(budget.prompt, _get_prompt_share(state, urgency))
        num_sharers = min(num_waiting, _MAX_SHARERS)
        throttle_prefills = throttle_prefills or _must_measure(state, num_streams, urgency)
    limit = _get_prompt_limit(state, budget)
    return StepPlan(budget, limit, throttle_prefills and num_streams > 0, num_sharers=num_sharers)


def _find_urgency(state: SchedulerState, prompts: Sequence[Request], num_waiting: int) -> float:
    """How much of the limits' margin prompts may take: 1, or more where it would hold them back unfairly.

    That is where many wait for their first token beside few streams, for then waiting costs more people more, and where
    one has waited long. Only streams count that had begun when the oldest prompt came: those that came with it have
    merely overtaken it.
    """
    waiting = [_get_arrival(r) for r in (*prompts, *state.waiting.requests[:1]) if not r.first_token]
    if not waiting:
        return 1.0
    oldest = min(waiting)
    num_older = sum(0.0 < r.first_token <= oldest for r in state.running.requests)
    crowd = _STREAMS_PER_PROMPT * num_waiting / max(1, num_older)
    return max(1.0, crowd, min((state.now - oldest) / _PATIENCE_S, _MAX_WAIT_FACTOR))


def _get_arrival(request: Request) -> float:
    """When it came to the edge, where that is known: while a step runs, the queue takes nothing in."""
    return min(request.queued, request.record.arrival_time or request.queued)


def _must_measure(state: SchedulerState, num_streams: int, urgency: float) -> bool:
    """Whether prompts are to wait for a step that shows what streams cost alone; urgent ones do with an old figure."""
    cost = state.cost
    return cost.is_stale(num_streams) and (urgency <= 1.0 or cost.scaled_gap(1.0) is None)


def _get_prompt_share(state: SchedulerState, urgency: float) -> int:
    """Prompt tokens that keep the gap between tokens within its limits; ``urgency`` stretches the factor."""
    section, cost = state.section, state.cost
    limits = [section.max_token_gap_ms / 1e3] if section.max_token_gap_ms > 0.0 else []
    if section.max_token_gap_factor:
        scaled = cost.scaled_gap(1.0 + (section.max_token_gap_factor - 1.0) * urgency)
        if scaled is not None:
            limits.append(max(scaled, _UNFELT_GAP_S))
    # Before any step of streams alone there is no measure: the least that advances.
    least = min(_LEAST_PROMPT_TOKENS, state.kv.block_size)
    return cost.max_prompt_tokens(min(limits, default=0.0), least, urgency)


def _get_prompt_limit(state: SchedulerState, budget: StepBudget) -> int:
    """Most tokens of one prompt in this step: the threshold, or an equal share when several would exceed it."""
    section, running = state.section, state.running.requests
    threshold = section.long_prefill_token_threshold
    if threshold <= 0 or len(state.requests) < 2:
        return _leave_room_for_head(state, budget)
    num_prompts = sum(r.num_computed_tokens < r.num_prompt_tokens for r in running)
    num_claims = num_prompts + (len(running) < section.max_num_seqs and len(state.waiting) > 0)
    room = min(budget.prompt, budget.room - (len(running) - num_prompts))
    return min(threshold, max(state.kv.block_size, room // max(1, num_claims)))


def _leave_room_for_head(state: SchedulerState, budget: StepBudget) -> int:
    """A prompt that would fill the step leaves room for the head of the queue where that is short beside it."""
    running, queue = state.running.requests, state.waiting.requests
    if not queue or len(running) >= state.section.max_num_seqs:
        return budget.prompt
    num_tokens = len(queue[0].token_ids)
    room = min(budget.prompt, budget.room - len(running))
    return room - num_tokens if _SHORT_SHARE * num_tokens <= room else budget.prompt


def build_output(state: SchedulerState, plan: StepPlan, metadata: bytes | None) -> SchedulerOutput:
    """The step as a record. A request without a valid row is sent whole; if it has a stale one, that ends first."""
    entries = plan.entries
    whole = [entry[0] for entry in entries if entry[0].needs_row]
    kept = [entry[0] for entry in entries if not entry[0].needs_row] if whole else [entry[0] for entry in entries]
    for request in whole:
        plan.new_block_ids.pop(request.request_id, None)
        if request.has_row:
            state.preempted_rows.append(request.request_id)
    executed = bool(entries) or metadata is not None
    return SchedulerOutput(
        step_id=state.next_step_id,
        new=[_make_new(state, request) for request in whole],
        cached=CachedRequests(
            request_ids=[r.request_id for r in kept],
            num_computed_tokens=[r.num_computed_tokens for r in kept],
            new_block_ids=plan.new_block_ids,
        ),
        num_scheduled_tokens={entry[0].request_id: entry[1] for entry in entries},
        total_num_scheduled_tokens=state.max_tokens - plan.budget.tokens,
        finished=state.ended_rows if executed else [],
        preempted=state.preempted_rows if executed else [],
        kv=KVActions(zero=[], copy=[]),
        spec={r.request_id: r.spec_token_ids[:drafts] for r, _, _, _, drafts in entries if drafts},
        grammar=[r.request_id for r, _, _, samples, _ in entries if r.uses_grammar and samples],
        encoder={},
        connector=metadata,
    )


def _make_new(state: SchedulerState, request: Request) -> NewRequest:
    record = request.record
    return NewRequest(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=state.kv.get_block_ids(request.request_id),
        sampling=record.sampling,
        eos_token_ids=record.eos_token_ids,
        bad_words_token_ids=record.bad_words_token_ids,
        lora_name=record.lora_name,
        fault=record.fault,
    )


def advance(state: SchedulerState, plan: StepPlan, output: SchedulerOutput) -> None:
    """The step is in flight: counts advance, sampled tokens become placeholders."""
    step_id = output.step_id
    for request, _, end, samples, num_drafts in plan.entries:
        request.num_computed_tokens = end
        request.num_in_flight += 1
        request.last_step = step_id
        if samples:
            request.num_output_placeholders += 1
            if num_drafts:
                request.num_draft_placeholders += num_drafts
            if request.spec_token_ids:
                request.spec_token_ids = []
    for record in output.new:
        request = state.requests[record.request_id]
        request.has_row, request.needs_row = True, False
    state.in_flight.append(
        InFlightStep(step_id, plan.entries, output.finished, output.preempted, plan.num_prompt_tokens, state.now)
    )
    state.ended_rows, state.preempted_rows = [], []
    state.next_step_id += 1
    num_waiting = len(state.waiting) + len(state.holding)
    counts, num_running = state.take_block_counts(), len(state.running)
    state.recorder.on_step(output, counts, num_running, num_waiting, state.head_reason, plan.ungranted, state.now)
