"""What one step runs: the scheduler's decision, in sections, for the executor and the runner.

A request is sent whole once (`NewRequest`, also when it resumes after a preemption); afterwards only what changed.
The runner keeps token values in the request's row, so a decode needs no token ids from here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.messages.sampling_params import SamplingParams

BlockIds = tuple[list[int], ...]
"""Block ids of one request, one list per KV cache group."""


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that gets a row. ``token_ids`` holds the prompt, then outputs already made (a resumed request)."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: BlockIds
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    lora_name: str | None = None
    fault: dict[str, Any] | None = None


class CachedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that keep their row, as parallel lists; ``new_block_ids`` holds only requests that got blocks."""

    request_ids: list[str]
    num_computed_tokens: list[int]
    new_block_ids: dict[str, BlockIds]


class KVActions(msgspec.Struct, frozen=True, kw_only=True):
    """Work on blocks before the forward: zero these, then copy ``(source, destination)`` pairs."""

    zero: list[int]
    copy: list[tuple[int, int]]


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step.

    ``num_scheduled_tokens`` names every request of the step in scheduling order with its tokens, drafts included.
    ``finished`` and ``preempted`` rows end before anything else is applied. ``spec`` maps a request to its drafts.
    ``grammar`` lists requests whose sampling needs a bitmask. ``connector`` is the KV connector's own metadata.
    """

    step_id: int
    new: list[NewRequest]
    cached: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished: list[str]
    preempted: list[str]
    kv: KVActions
    spec: dict[str, list[int]]
    grammar: list[str]
    encoder: dict[str, list[int]]
    connector: bytes | None = None


class GrammarOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Token bitmasks for `sample_tokens`: one int32 row of ``ceil(vocab / 32)`` words per request (and per draft)."""

    request_ids: list[str]
    bitmask: bytes
    num_words: int
