"""What the core sends to a frontend after each step."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec

from headrace.messages.runner_output import PromptLogprobs, TokenLogprobs


class FinishReason(str, Enum):
    """Why a request ended, in the words of the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`Clock.monotonic` seconds of a request's milestones so far; 0 where it never came.

    They travel with the first token, for a request that the frontend ends itself, and with the last output.
    """

    arrival: float = 0.0
    queued: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one request. ``stop_reason`` is the stop token id; stop strings are found by the frontend."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    times: RequestTimes | None = None
    kv_transfer_params: dict[str, Any] | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Live state and running totals of the scheduler; totals count since start.

    ``phase_seconds`` are parts of steps, ``cause_seconds`` is the time of requests by what it went to, ``graph_steps``
    counts steps by graph mode. ``histograms`` holds, by name, the counts of each bucket and the sum of the values.
    ``sleep_level`` is 0 while awake.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    recompute_tokens: int = 0
    external_queries: int = 0
    external_hits: int = 0
    num_corrupted: int = 0
    num_watermark_admitted: int = 0
    num_watermark_held: int = 0
    sleep_level: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    waiting_reasons: dict[str, int] = {}
    phase_seconds: dict[str, float] = {}
    cause_seconds: dict[str, float] = {}
    graph_steps: dict[str, int] = {}
    histograms: dict[str, tuple[list[int], float]] = {}


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a control verb that carried a ``call_id``: a value, or an error for that caller only."""

    call_id: int
    value: Any = None
    error: str | None = None


class EngineCoreOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """One message to one client."""

    outputs: list[EngineCoreOutput] = []
    replies: list[ControlReply] = []
    stats: SchedulerStats | None = None
    dead: str | None = None


class GraphSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What capture gave: the mode of steps that fit and why, and the largest (tokens, requests) of each graph."""

    mode: str
    reason: str
    sizes: list[tuple[int, int]] = []


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Sent once by a core that can serve: the final numbers that the frontend checks requests against.

    ``vocab_size`` is the width of the logits. ``phases_ms`` is the start-up timeline.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    kv_cache_tokens: int
    max_concurrency: float
    attention: str = ""
    graphs: GraphSummary | None = None
    phases_ms: dict[str, float] = {}


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Sent instead of `CoreReady` by a core that cannot start: the cause, and whose fault it is."""

    kind: Literal["config", "model_file", "internal"]
    message: str


FromCore = CoreReady | CoreFailed | EngineCoreOutputs
