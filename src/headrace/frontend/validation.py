"""The one validator: HTTP, batch files and ``LLM`` all pass through it before anything is queued.

`SamplingParams` has already checked types, finiteness and ranges. Here is what depends on the model in force, on the
operator's limits or on several fields together. Every check either passes or raises `InvalidRequestError` with the
field named; values of the request are never echoed. It knows no tokenizer: what must be encoded arrives as ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import EngineConfig, LimitsSection
from headrace.messages.outputs import CoreReady
from headrace.messages.sampling_params import SamplingParams

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 128
MAX_STOP_CHARS = 8192
MAX_BAD_WORD_CHARS = 8192
MAX_BAD_WORD_TOKENS = 1024
PRIORITY_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model and the operator allow.

    ``vocab_size`` is the width of the logits. ``max_logprobs`` -1 is the whole vocabulary. ``kv_cache_tokens`` is what
    one request alone may fill. ``most`` is what the operator lets one request ask for.
    """

    max_model_len: int
    vocab_size: int
    kv_cache_tokens: int
    max_logprobs: int = 20
    has_priority: bool = False
    most: LimitsSection = field(default_factory=LimitsSection)

    @staticmethod
    def from_ready(ready: CoreReady, config: EngineConfig) -> RequestLimits:
        """The limits of a core that reported ready."""
        fits_any = ready.max_concurrency >= 1 or ready.kv_cache_tokens <= 0
        return RequestLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            kv_cache_tokens=ready.max_model_len if fits_any else ready.kv_cache_tokens,
            max_logprobs=config.observability.max_logprobs,
            has_priority=config.scheduler.scheduling_policy == "priority",
            most=config.limits,
        )


def check_request_id(request_id: Any) -> None:
    """Raise unless a client's request id is short printable text."""
    ok = isinstance(request_id, str) and 0 < len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isprintable()
    if not ok:
        message = f"request_id must be printable text of 1 to {MAX_REQUEST_ID_CHARS} characters"
        raise InvalidRequestError(message, param="request_id")


def check_cache_salt(cache_salt: Any) -> None:
    """Raise unless a salt is absent or short text that is not empty."""
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str) or not 0 < len(cache_salt) <= MAX_CACHE_SALT_CHARS:
        message = f"cache_salt must be text of 1 to {MAX_CACHE_SALT_CHARS} characters"
        raise InvalidRequestError(message, param="cache_salt")


def check_priority(priority: Any, limits: RequestLimits) -> None:
    """Raise for a priority that is no 64-bit integer, or that the scheduling policy would ignore."""
    ok = isinstance(priority, int) and not isinstance(priority, bool) and -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT
    if not ok:
        raise InvalidRequestError("priority must be a 64-bit integer", param="priority")
    if priority and not limits.has_priority:
        message = "priority needs the server's --scheduling-policy priority"
        raise InvalidRequestError(message, param="priority")


def check_kv_transfer_params(value: Any) -> None:
    """Raise unless what is meant for the KV connector is absent or an object."""
    if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise InvalidRequestError("kv_transfer_params must be an object", param="kv_transfer_params")


def check_prompt_chars(num_chars: int, max_chars_per_token: int, limits: RequestLimits) -> None:
    """Raise for a text that no tokenisation can make short enough, before it is tokenised."""
    if num_chars > limits.most.max_prompt_chars:
        message = f"the prompt must not have more than {limits.most.max_prompt_chars} characters"
        raise InvalidRequestError(message, param="prompt", code="context_length_exceeded")
    if num_chars > limits.max_model_len * max_chars_per_token:
        message = f"the prompt of {num_chars} characters cannot fit into the context of {limits.max_model_len} tokens"
        raise InvalidRequestError(message, param="prompt", code="context_length_exceeded")


def check_num_prompts(num_prompts: int, n: int, limits: RequestLimits) -> None:
    """Raise for more prompts in one request, or more answers to all of them together, than are allowed."""
    check_count("prompt", num_prompts, limits.most.max_prompts)
    if num_prompts * n > limits.most.max_answers:
        message = f"n times the number of prompts must not exceed {limits.most.max_answers}"
        raise InvalidRequestError(message, param="n")


def check_chat_size(messages: Any, tools: Any, limits: RequestLimits) -> None:
    """Raise for more messages or tools than are allowed, before a template sees them."""
    for name, value, most in (
        ("messages", messages, limits.most.max_messages),
        ("tools", tools, limits.most.max_tools),
    ):
        if isinstance(value, (list, tuple)):
            check_count(name, len(value), most)


def check_token_ids(name: str, token_ids: Collection[Any], limits: RequestLimits) -> None:
    """Raise unless all are integers in [0, vocabulary)."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        raise InvalidRequestError(f"{name} must hold token ids in [0, {limits.vocab_size})", param=name)


def check_prompt(prompt_token_ids: Sequence[Any], limits: RequestLimits) -> None:
    """Raise for an empty prompt, one that leaves no room, or one with ids outside the vocabulary."""
    num_tokens = len(prompt_token_ids)
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty", param="prompt", code="empty_prompt")
    if num_tokens >= limits.max_model_len:
        message = (
            f"the prompt has {num_tokens} tokens; with the maximum context length of {limits.max_model_len} tokens"
            f" at most {limits.max_model_len - 1} leave room for an answer"
        )
        raise InvalidRequestError(message, param="prompt", code="context_length_exceeded")
    check_token_ids("prompt", prompt_token_ids, limits)


def check_sampling(params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits) -> None:
    """Raise for sampling that this model cannot do or this operator does not allow."""
    if params.n > limits.most.max_n:
        raise InvalidRequestError(f"n must not be more than {limits.most.max_n}", param="n")
    check_count("stop", len(params.stop), limits.most.max_stop_strings)
    check_count("bad_words", len(params.bad_words), limits.most.max_bad_words)
    check_count("stop_token_ids", len(params.stop_token_ids), limits.most.max_stop_tokens)
    most_allowed = min(limits.most.max_allowed_tokens, limits.vocab_size)
    check_count("allowed_token_ids", len(params.allowed_token_ids or ()), most_allowed)
    check_count("logit_bias", len(params.logit_bias or ()), limits.most.max_biased_tokens)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    check_token_ids("logit_bias", params.logit_bias or (), limits)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    if sum(map(len, params.bad_words)) > MAX_BAD_WORD_CHARS:
        message = f"bad_words must not have more than {MAX_BAD_WORD_CHARS} characters together"
        raise InvalidRequestError(message, param="bad_words")
    if sum(map(len, params.stop)) > MAX_STOP_CHARS:
        message = f"stop strings must not have more than {MAX_STOP_CHARS} characters together"
        raise InvalidRequestError(message, param="stop")
    num_answers = params.n * resolve_max_tokens(params, num_prompt_tokens, limits)
    _check_logprobs("logprobs", params.logprobs, num_answers, limits)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, num_prompt_tokens, limits)
    check_structured_outputs(params, limits.most)


def check_count(name: str, count: int, most: int) -> None:
    """Raise for more entries than are allowed."""
    if count > most:
        raise InvalidRequestError(f"{name} must not have more than {most} entries", param=name)


def _check_logprobs(name: str, asked: int | None, num_positions: int, limits: RequestLimits) -> None:
    """Bound the entries per position, and the product with the positions: spelling -1 as a number gains nothing."""
    if asked is None:
        return
    most = limits.vocab_size if limits.max_logprobs < 0 else min(limits.max_logprobs, limits.vocab_size)
    count = limits.vocab_size if asked < 0 else asked
    if count > most:
        raise InvalidRequestError(f"{name} must not be more than {most}", param=name)
    if (count + 1) * num_positions > limits.most.max_logprob_entries:
        message = f"{name} times the number of tokens must not exceed {limits.most.max_logprob_entries}"
        raise InvalidRequestError(message, param=name)


def check_structured_outputs(params: SamplingParams, most: LimitsSection, param: str = "structured_outputs") -> None:
    """Raise unless exactly one constraint of a sane size is set, if any; ``param`` names the field in errors."""
    asked = params.structured_outputs
    if asked is None:
        return
    values = [getattr(asked, name) for name in asked.__struct_fields__ if name != "reasoning"]
    if sum(value is not None and value is not False for value in values) != 1:
        message = f"{param} needs exactly one of json, json_object, regex, choice, grammar, structural_tag"
        raise InvalidRequestError(message, param=param)
    if asked.choice is not None and not (asked.choice and all(asked.choice)):
        raise InvalidRequestError(f"{param}.choice must hold texts", param=param)
    texts = [asked.json, asked.regex, asked.grammar, asked.structural_tag, *(asked.choice or ())]
    if sum(len(text) for text in texts if text is not None) > most.max_grammar_chars:
        message = f"{param} must not be longer than {most.max_grammar_chars} characters"
        raise InvalidRequestError(message, param=param)


def check_masks(params: SamplingParams, eos: Sequence[int], bad_words: Sequence[Sequence[int]]) -> None:
    """Raise where the masks visibly forbid every token.

    Args:
        params: the request's sampling.
        eos: ids that end a text, empty under ``ignore_eos``.
        bad_words: all spellings of the bad words as ids.
    """
    if params.allowed_token_ids is None:
        return
    allowed = set(params.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
    if not allowed:
        message = "allowed_token_ids and bad_words together forbid every token"
        raise InvalidRequestError(message, param="allowed_token_ids")
    if params.min_tokens and allowed <= {*eos, *params.stop_token_ids}:
        message = "allowed_token_ids holds only tokens that min_tokens forbids at the start"
        raise InvalidRequestError(message, param="allowed_token_ids")


def check_bad_words(bad_words: Sequence[Sequence[int]], limits: RequestLimits) -> None:
    """Raise for bad words that have no tokens, or too many."""
    if not all(bad_words):
        raise InvalidRequestError("bad_words must hold words that have tokens", param="bad_words")
    if sum(map(len, bad_words)) > MAX_BAD_WORD_TOKENS:
        message = f"bad_words must not have more than {MAX_BAD_WORD_TOKENS} tokens in all their spellings"
        raise InvalidRequestError(message, param="bad_words")
    for word in bad_words:
        check_token_ids("bad_words", word, limits)


def check_fits(num_prompt_tokens: int, max_tokens: int, limits: RequestLimits) -> None:
    """Raise for a request that could not run even alone."""
    need = min(num_prompt_tokens + max_tokens, limits.max_model_len)
    if need > limits.kv_cache_tokens:
        message = (
            f"the prompt and max_tokens need KV blocks for {need} tokens but the engine has only"
            f" {limits.kv_cache_tokens}; ask for less, or give the server more --kv-cache-memory"
        )
        raise InvalidRequestError(message, param="max_tokens", code="context_length_exceeded")


def resolve_max_tokens(params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits) -> int:
    """Return how many tokens may be generated: what was asked, but no more than the context leaves."""
    room = limits.max_model_len - num_prompt_tokens
    return room if params.max_tokens is None else min(params.max_tokens, room)


def resolve_sampling(
    params: SamplingParams, num_prompt_tokens: int, seed: int, limits: RequestLimits
) -> SamplingParams:
    """Return the sampling as it will be in force: limits within the room, no ``top_k`` that limits nothing, a seed."""
    max_tokens = resolve_max_tokens(params, num_prompt_tokens, limits)
    return msgspec.structs.replace(
        params,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        top_k=params.top_k if 0 < params.top_k < limits.vocab_size else 0,
        seed=seed,
    )
