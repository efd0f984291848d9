"""Requests for tests, as they leave the edge: everything resolved."""

from __future__ import annotations

from typing import Any

from headrace.messages.requests import EngineCoreRequest
from headrace.messages.sampling_params import SamplingParams


def make_request(
    request_id: str = "r",
    prompt: list[int] | int = 5,
    max_tokens: int = 4,
    *,
    seed: int = 1,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> EngineCoreRequest:
    """A core request; ``prompt`` may be a length, for token ids that count from 10 up."""
    token_ids = [10 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **(sampling or {}))
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=params, **fields)
