"""What callers of ``AsyncLLM`` and ``LLM`` receive, with the field names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.messages.outputs import RequestTimes


@dataclass(slots=True)
class Logprob:
    """One candidate: its raw log-probability, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id to `Logprob` at one position, the chosen token first."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers. Under DELTA all fields hold only what is new."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request.

    ``prompt_logprobs[0]`` is ``None``: the first token has nothing before it. ``num_cached_tokens`` counts prompt
    tokens that the prefix cache gave. ``outputs`` is in index order.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    kv_transfer_params: dict[str, Any] | None = None
