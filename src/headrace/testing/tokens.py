"""Pseudo tokens: a model whose every answer is a pure function of the request.

The token at position ``p`` depends on the request's seed and on all tokens before ``p``, through a running hash. Any
wrong token, wrong order or wrong KV entry on the way changes everything after it, so equality with
`expected_output` says that scheduling, caching, preemption, chunking and pipelining left the request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

from headrace.messages.outputs import FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import TokenLogprobs

_MASK = (1 << 64) - 1


def extend_hash(running: int, token_id: int) -> int:
    """The running hash after one more token: never 0, 64 bits (the finaliser of SplitMix64)."""
    x = (running * 0x9E3779B97F4A7C15 + token_id + 1) & _MASK
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _MASK
    x ^= x >> 27
    return x or 1


def hash_tokens(token_ids: Iterable[int], running: int = 1) -> int:
    """The running hash over ``token_ids``."""
    for token_id in token_ids:
        running = extend_hash(running, token_id)
    return running


def pick_token(seed: int, running: int, vocab_size: int, banned: Container[int] = ()) -> int:
    """The token that follows a sequence with this running hash; ``banned`` ones give way to others."""
    draw = extend_hash(running ^ (seed & _MASK), 0x5EED)
    while draw % vocab_size in banned:
        draw = extend_hash(draw, 0x5EED)
    return draw % vocab_size


def fake_logprobs(token_id: int, count: int, vocab_size: int = 1 << 30) -> TokenLogprobs:
    """Plausible logprobs: the token itself is the best, its followers by id come next."""
    count = vocab_size if count < 0 else count
    candidates = [token_id, *((token_id + place) % vocab_size for place in range(count))]
    return TokenLogprobs(candidates, [-0.5, *(-0.5 - place for place in range(count))], 1)


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """How a request must end when nothing goes wrong."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


def expected_output(
    request: EngineCoreRequest,
    *,
    vocab_size: int,
    max_model_len: int,
    forbidden: Callable[[int], Collection[int]] | None = None,
) -> ExpectedOutput:
    """What any correct engine answers to ``request`` on the pseudo model.

    ``forbidden`` says which tokens a grammar does not allow as output number ``i``.
    """
    sampling = request.sampling
    assert sampling.max_tokens is not None
    assert sampling.seed is not None
    running = hash_tokens(request.prompt_token_ids)
    stops = {*request.eos_token_ids, *sampling.stop_token_ids}
    room = min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids))
    token_ids: list[int] = []
    while True:
        banned = set(stops) if len(token_ids) < sampling.min_tokens else set()
        if forbidden is not None:
            banned |= set(forbidden(len(token_ids)))
        token_id = pick_token(sampling.seed, running, vocab_size, banned)
        token_ids.append(token_id)
        running = extend_hash(running, token_id)
        if token_id in request.eos_token_ids:
            return ExpectedOutput(token_ids, FinishReason.STOP, None)
        if token_id in sampling.stop_token_ids:
            return ExpectedOutput(token_ids, FinishReason.STOP, token_id)
        if len(token_ids) >= room:
            return ExpectedOutput(token_ids, FinishReason.LENGTH, None)
