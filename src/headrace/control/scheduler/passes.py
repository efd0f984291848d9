"""The passes of a step: grant to those who run, admit those who wait, and see that something moves."""

from __future__ import annotations

from collections.abc import Collection

from headrace.control.scheduler.admission import Admission
from headrace.control.scheduler.plan import StepPlan
from headrace.control.scheduler.preemption import make_room, release_held
from headrace.control.scheduler.recorder import WaitReason
from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import SchedulerState

# Beyond a head that does not fit, this many requests are tried in a step: a long queue must not cost a long look.
_MAX_TRIED_BEHIND_HEAD = 4

# Waits of unknown length, during which others may pass. A preempted request that waits for its own steps in flight is
# not among them: others would take the blocks that it gave up.
_STEP_ASIDE = frozenset({WaitReason.GRAMMAR, WaitReason.REMOTE_KVS, WaitReason.EXTERNAL_HIT})


def running_pass(state: SchedulerState, plan: StepPlan, only: Collection[str] | None) -> None:
    """Grant to running requests, most urgent first. Preemption shortens the list from its end while it is walked."""
    running, budget, entries = state.running.requests, plan.budget, plan.entries
    plan.ungranted.clear()
    # A request that decodes one token into a block that it has needs no more than a look.
    steady = only is None and not state.num_draft_tokens
    for index, request in enumerate(running):
        computed = request.num_computed_tokens
        known = len(request.token_ids) + request.num_output_placeholders
        end = computed + 1
        if (
            steady
            and known == end
            and end <= request.num_slots
            and end < request.max_total_tokens
            and budget.tokens > 0
            and budget.inputs > 0
        ):
            budget.tokens -= 1
            budget.inputs -= 1
            entries.append((request, 1, end, True, 0))
        elif budget.room <= 0:
            reason = WaitReason.TOKEN_BUDGET if budget.tokens <= 0 else WaitReason.INPUT_BUDGET
            plan.ungranted.update(dict.fromkeys((r.request_id for r in running[index:]), reason))
            break
        elif only is not None and request.request_id not in only:
            plan.ungranted[request.request_id] = WaitReason.DRAIN
        elif known <= computed:
            plan.ungranted[request.request_id] = WaitReason.STEPS_IN_FLIGHT
        elif (why := _grant(state, plan, request, len(running) - index - 1)) is not None:
            plan.ungranted[request.request_id] = why


def _grant(state: SchedulerState, plan: StepPlan, request: Request, num_later: int) -> WaitReason | None:
    """The general case: chunks, drafts, blocks to take. Says why the request gets nothing, if so."""
    budget, computed, num_drafts = plan.budget, request.num_computed_tokens, len(request.spec_token_ids)
    num_tokens = request.num_to_compute()
    if num_tokens <= 0 or request.num_draft_placeholders:
        return WaitReason.STEPS_IN_FLIGHT
    is_prompt = num_tokens > 1 + num_drafts
    if is_prompt:
        num_tokens = _shorten(plan, num_tokens, num_later)
    num_tokens = min(num_tokens, budget.room)
    if num_tokens <= 0:
        return WaitReason.THROTTLED
    if computed + num_tokens + state.num_draft_tokens > request.num_slots:
        num_tokens = _grow(state, plan, request, num_tokens)
    if num_tokens <= 0:
        return WaitReason.NO_BLOCKS
    if is_prompt:
        plan.take_prompt_tokens(num_tokens)
    budget.charge(num_tokens)
    end = computed + num_tokens
    # Drafts stand last: a grant that was cut short has fewer of them.
    cut = request.num_tokens_with_spec - end
    plan.entries.append((request, num_tokens, end, cut <= num_drafts, max(0, num_drafts - cut)))
    return None


def _shorten(plan: StepPlan, num_tokens: int, num_later: int) -> int:
    """Cut a prompt's chunk so that every later running request still gets a token: prompts fill, streams flow."""
    if plan.defer_prompts:
        return 0
    left_for_others = plan.budget.room - num_later * (1 + plan.budget.draft_slots)
    return min(num_tokens, plan.prompt_room, max(1, left_for_others))


def _grow(state: SchedulerState, plan: StepPlan, request: Request, num_tokens: int) -> int:
    """Take blocks for a running request; returns the tokens it can have."""
    room = state.max_model_len - request.num_computed_tokens - num_tokens
    lookahead = min(state.num_draft_tokens, room)
    num_preempted = state.totals.preemptions
    grown = make_room(state, request, num_tokens, lookahead)
    if grown is None or state.totals.preemptions > num_preempted:
        plan.short_of_blocks = True
    if grown is None:
        return 0
    num_tokens, block_ids = grown
    request.num_slots = state.kv.num_slots(request.request_id)
    if any(block_ids):
        plan.new_block_ids[request.request_id] = block_ids
    return num_tokens


def waiting_pass(state: SchedulerState, plan: StepPlan) -> None:
    """Admit those that hold blocks already, then the queue in its order."""
    if not len(state.waiting) and not len(state.holding):
        return
    state.head_reason = None
    if plan.defer_prompts:
        state.head_reason = WaitReason.THROTTLED
        return
    for queue in (state.holding, state.waiting):
        _admit_from(state, queue.requests, plan)


def _admit_from(state: SchedulerState, queue: list[Request], plan: StepPlan) -> None:
    outstanding: int | None = None
    blocked: Request | None = None
    num_tried_behind = 0
    passed = False
    index = 0
    while index < len(queue):
        request = queue[index]
        reason = _find_limit(state, plan)
        if reason is None:
            if outstanding is None:
                outstanding = sum(_count_outstanding(state, r) for r in state.running)
            # Nothing is reserved when nothing runs: what fits alone is then always admitted.
            reserved = outstanding + state.watermark_blocks if len(state.running) else 0
            reason = _try_admit(state, request, plan, reserved)
            if reason is None:
                state.totals.watermark_admitted += reserved > 0
                passed = passed or blocked is not None
                outstanding += _count_outstanding(state, request)
                continue
        told = WaitReason.PRIORITY if _is_overtaken(state, request, reason) else reason
        state.totals.watermark_held += reason is WaitReason.NO_BLOCKS and request.wait_reason is not told
        state.set_wait_reason(request, told)
        state.head_reason = state.head_reason or told
        if reason in _STEP_ASIDE:
            index += 1
            continue
        if reason is not WaitReason.NO_BLOCKS:
            break
        if blocked is None:
            blocked = request
            _note_blocked(state, request)
        num_tried_behind += 1
        if num_tried_behind > _MAX_TRIED_BEHIND_HEAD or state.num_bypass_steps >= state.section.max_head_bypass_steps:
            break
        index += 1
    if passed:
        state.num_bypass_steps += 1


def _is_overtaken(state: SchedulerState, request: Request, reason: WaitReason) -> bool:
    """Whether what a request lacks is held by a more urgent one that came after it."""
    if state.section.scheduling_policy == "fcfs" or reason in _STEP_ASIDE or reason is WaitReason.STEPS_IN_FLIGHT:
        return False
    priority, rank = request.record.priority, request.rank
    return any(other.rank > rank and other.record.priority < priority for other in state.running)


def _note_blocked(state: SchedulerState, request: Request) -> None:
    if state.blocked_head is not request:
        state.blocked_head = request
        state.num_bypass_steps = 0


def _find_limit(state: SchedulerState, plan: StepPlan) -> WaitReason | None:
    if len(state.running) >= state.section.max_num_seqs:
        return WaitReason.RUNNING_LIMIT
    if plan.budget.tokens <= 0:
        return WaitReason.TOKEN_BUDGET
    if plan.budget.room <= 0:
        return WaitReason.INPUT_BUDGET
    # Tokens are left, but the share that streams leave to prompts is not.
    return WaitReason.THROTTLED if plan.budget.prompt <= 0 else None


def _count_outstanding(state: SchedulerState, request: Request) -> int:
    """Blocks that a running request's known tokens still need: an admission must leave them."""
    if request.num_tokens <= request.num_slots or request.status is not RequestStatus.RUNNING:
        return 0
    return state.kv.num_blocks_of_whole(request.request_id, request.num_tokens)


def _try_admit(state: SchedulerState, request: Request, plan: StepPlan, reserved: int) -> WaitReason | None:
    budget = plan.budget
    limit = min(budget.room, plan.prompt_room)
    admission = Admission(state, request, limit, reserved, state.num_draft_tokens)
    reason = admission.attempt()
    if reason is None and admission.num_tokens:
        num_tokens = admission.num_tokens
        budget.charge(num_tokens)
        plan.take_prompt_tokens(num_tokens)
        end = request.num_computed_tokens + num_tokens
        plan.entries.append((request, num_tokens, end, end == request.num_tokens, 0))
    return reason


def ensure_progress(state: SchedulerState, plan: StepPlan) -> None:
    """The rule against silent stalls: ready requests, nothing in flight or pending, and nothing ran.

    Those that hold blocks without running give them up, least urgent first; when there is nobody left to take
    from, the head fails rather than wait for ever.
    """
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
