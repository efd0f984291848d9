"""What one step produced: the runner's answer to a `SchedulerOutput`."""

from __future__ import annotations

import msgspec

NO_TOKEN_LEFT = "the request's constraints leave no token to choose from"
"""The error of a row whose masks together forbid every token; the request is at fault, not the engine."""
GRAMMAR_TOO_COSTLY = "the grammar became too costly to follow"
"""How the error of a grammar begins that is beyond a limit in the middle of a text; the request's fault too."""
NON_FINITE = "the model produced logits that are not finite"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the token itself first, then the best ones in falling order.

    ``rank`` is the token's rank in the raw distribution, 1 for the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Entries for prompt positions ``start`` and on; position 0 has none and is never sent."""

    start: int
    entries: list[TokenLogprobs]


class ConnectorOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the worker side of the KV connector learnt during a step."""

    finished_sending: tuple[str, ...] = ()
    finished_receiving: tuple[str, ...] = ()
    failed_receiving: tuple[str, ...] = ()
    invalid_block_ids: tuple[int, ...] = ()


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the step ran, for the flight recorder: times in seconds, the graph mode with its reason."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    graph_mode: str = "EAGER"
    graph_reason: str = ""


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampled tokens per request of the step.

    ``sampled_token_ids[i]`` belongs to ``request_ids[i]`` and is empty when the request's last known token was not
    computed in this step (a chunk that is not the last) or when the row failed. ``errors`` holds rows that failed, with
    the cause; they end, the others go on.
    """

    request_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    drafts: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    pooled: dict[str, list[float]] = {}
    connector: ConnectorOutput | None = None
    stats: StepStats | None = None
