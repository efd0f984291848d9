"""The commit point of a step: what the runner computed becomes certain.

Order of effects: what the connector learnt is applied (it may lower requests, whose results of this step are then
dropped); blocks that waited for this step are freed; then, request by request, tokens are appended, stops found,
full blocks made findable, and ended requests released. Whoever has ended, or was marked, is passed over.
"""

from __future__ import annotations

from headrace.control.scheduler.request import Request, RequestStatus
from headrace.control.scheduler.state import Entry, InFlightStep, SchedulerState
from headrace.control.scheduler.stop import find_stop
from headrace.control.scheduler.transfers import apply_connector_output
from headrace.messages.outputs import EngineCoreOutput, FinishReason
from headrace.messages.runner_output import NON_FINITE, ModelRunnerOutput, TokenLogprobs


def commit_step(state: SchedulerState, step: InFlightStep, output: ModelRunnerOutput) -> None:
    """Apply a step's results; outputs for clients go to the outbox."""
    _learn_cost(state, step)
    if output.connector is not None:
        apply_connector_output(state, output.connector)
    state.kv.release_fenced(step.step_id)
    sampled = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    outbox, step_id, now = state.outbox, step.step_id, state.now
    block_size = state.kv.block_size
    plain = not (output.logprobs or output.prompt_logprobs or output.errors or output.drafts)
    num_steady = 0
    for entry in step.entries:
        request, _, end, samples, num_drafts = entry
        request.num_in_flight -= 1
        if request.ended or step_id <= request.discard_until:
            continue
        result: EngineCoreOutput | None
        tokens = sampled.get(request.request_id)
        if plain and request.streams and samples and not num_drafts and end % block_size:
            # Steady decode: one token that stops nothing and fills no block.
            assert tokens is not None
            (token_id,) = tokens
            if token_id not in request.stop_ids and end + 1 < request.max_total_tokens:
                request.token_ids.append(token_id)
                request.num_output_placeholders -= 1
                request.num_committed_tokens = end
                request.last_token = now
                num_steady += 1
                result = EngineCoreOutput(
                    request_id=request.request_id, new_token_ids=tokens, num_cached_tokens=request.num_cached_tokens
                )
            else:
                result = _commit_request(state, entry, tokens, output)
        else:
            result = _commit_request(state, entry, tokens, output)
        if result is not None:
            client = request.record.client_index
            if client in outbox:
                outbox[client].append(result)
            else:
                outbox[client] = [result]
    state.totals.generation_tokens += num_steady


def _learn_cost(state: SchedulerState, step: InFlightStep) -> None:
    """What counts is what streams feel: from commit to commit, or from the decision when nothing was in flight."""
    duration_s = state.now - max(step.scheduled_at, state.last_commit)
    state.cost.record(duration_s, step.num_prompt_tokens, len(step.entries))
    state.last_commit = state.now


def _commit_request(
    state: SchedulerState, entry: Entry, tokens: list[int] | None, output: ModelRunnerOutput
) -> EngineCoreOutput | None:
    request, _, end, samples, num_drafts = entry
    request_id = request.request_id
    request.loads_in_step = False
    if output.prompt_logprobs and request_id in output.prompt_logprobs:
        request.add_prompt_logprobs(output.prompt_logprobs[request_id])
    if output.errors and request_id in output.errors:
        cause = output.errors[request_id]
        state.totals.corrupted += cause == NON_FINITE
        if request.uses_grammar:
            # A mask without any token was left by a grammar that failed.
            cause = state.grammar.get_error(request_id) or cause
        return state.end_with_output(request, FinishReason.ERROR, cause)
    stop: tuple[FinishReason, int | None] | None = None
    if samples:
        request.num_output_placeholders -= 1
        assert tokens, f"step without a token for {request_id}"
        if num_drafts:
            end -= _judge_drafts(request, num_drafts, len(tokens))
        # Steady decode is one token that stops nothing; the rest is worth a call.
        request.token_ids.append(tokens[0])
        if len(tokens) > 1 or tokens[0] in request.stop_ids or len(request.token_ids) >= request.max_total_tokens:
            tokens, stop = _append_rest(request, tokens)
    else:
        tokens = None
    if request.status is RequestStatus.RUNNING:
        _commit_blocks(state, request, end)
    if tokens is None:
        return None
    error = state.grammar.accept(request_id, tokens) if request.uses_grammar else None
    if error is not None:
        return state.end_with_output(request, FinishReason.ERROR, error)
    if output.drafts and not request.num_output_placeholders and request.status is RequestStatus.RUNNING:
        request.spec_token_ids = list(output.drafts.get(request_id, ()))
    logprobs = output.logprobs.get(request_id) if output.logprobs else None
    return _make_output(state, request, tokens, logprobs, stop)


def _judge_drafts(request: Request, num_drafts: int, num_sampled: int) -> int:
    """Take rejected drafts back; returns how many."""
    rejected = num_drafts + 1 - num_sampled
    request.num_draft_placeholders -= num_drafts
    if request.status is RequestStatus.RUNNING:
        request.num_computed_tokens -= rejected
    return rejected


def _append_rest(request: Request, tokens: list[int]) -> tuple[list[int], tuple[FinishReason, int | None] | None]:
    """Judge the first token, which is appended, and append the others up to a stop; returns the tokens that count."""
    for index, token_id in enumerate(tokens):
        if index:
            request.token_ids.append(token_id)
        stop = find_stop(request, token_id)
        if stop is not None:
            if request.record.sampling.max_tokens == 0:
                request.token_ids.pop()
                return [], stop
            return tokens[: index + 1], stop
    return tokens, None


def _commit_blocks(state: SchedulerState, request: Request, end: int) -> None:
    """Make the blocks that this step filled findable; tokens past a stop are in none of them."""
    end = min(end, len(request.token_ids))
    size = state.kv.block_size
    if end // size > request.num_committed_tokens // size:
        state.kv.cache_committed(request, end)
    request.num_committed_tokens = end


def _make_output(
    state: SchedulerState,
    request: Request,
    tokens: list[int],
    logprobs: list[TokenLogprobs] | None,
    stop: tuple[FinishReason, int | None] | None,
) -> EngineCoreOutput:
    now, totals = state.now, state.totals
    totals.generation_tokens += len(tokens)
    request.last_token = now
    result = EngineCoreOutput(
        request_id=request.request_id, new_token_ids=tokens, num_cached_tokens=request.num_cached_tokens
    )
    if not request.first_token:
        request.first_token = now
        totals.prompt_tokens += request.num_prompt_tokens
        result.times = request.make_times()
    if request.prompt_logprobs is not None:
        result.prompt_logprobs = request.take_prompt_logprobs()
    if logprobs is not None:
        result.logprobs = logprobs[: len(tokens)]
    if stop is None:
        request.streams = request.status is RequestStatus.RUNNING and not request.uses_grammar
    else:
        result.finish_reason, result.stop_reason = stop
        result.kv_transfer_params = state.finish(request, stop[0])
        result.times = request.make_times()
    return result
