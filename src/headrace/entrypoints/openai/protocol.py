"""The bodies of requests: one schema that parses, validates types and feeds the OpenAPI page.

A field that is absent or null is open, so that the model's own defaults can fill it. Unknown fields are refused by
name. Fields typed ``Any`` are those of OpenAI's clients that headrace does not act on: `refusals` says which of their
values change nothing and are therefore accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.config.sections import MAX_MESSAGES
from headrace.messages.sampling_params import SamplingParams

MAX_ID_CHARS = 128
MAX_ABORTED = 4096
MAX_SALT_CHARS = 128
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

Answered = Annotated[int, Meta(ge=1)]
"""A limit of tokens where an answer without any would be no answer."""
ClientId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARS)],
    ],
    Meta(max_length=MAX_METADATA_PAIRS),
]
"""What OpenAI allows: 16 pairs of short texts."""


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class DeliveryFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What every generating route takes beside the prompt and the sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    request_id: ClientId | None = None
    cache_salt: Salt | None = None
    kv_transfer_params: Any = None


class SamplingFields(DeliveryFields, kw_only=True, forbid_unknown_fields=True):
    """What completions, chats and responses say alike about sampling, by the names of `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    # checked by `constraints`
    structured_outputs: Any = None
    metadata: Metadata | None = None
    # accepted where they change nothing, see `refusals`
    user: Any = None
    store: bool | None = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class GenerationFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats take alike."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_timing: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    # checked by `constraints`
    response_format: Any = None
    # accepted where they change nothing, see `refusals`
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None


class ChatMessage(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn. What templates do not read (``annotations``, …) is accepted and left out."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    max_tokens: Answered | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: Any = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: Answered | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    documents: Any = None
    echo: Any = None


GenerateSampling = msgspec.defstruct(
    "GenerateSampling",
    [
        (one.name, one.type | msgspec.UnsetType, msgspec.UNSET)
        if one.name == "max_tokens"
        else (one.name, one.type | None, None)
        for one in msgspec.structs.fields(SamplingParams)
        if one.name != "output_kind"
    ],
    module=__name__,
    kw_only=True,
    forbid_unknown_fields=True,
)
"""The fields of `SamplingParams` as a body has them: absent or null is open, but a null ``max_tokens`` is the room."""


class GenerateRequest(DeliveryFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: GenerateSampling | None = None  # type: ignore[valid-type]
    output_mode: Literal["tokens", "text"] = "tokens"
    features: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Answered | None = None
    text: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Any = None
    include_reasoning: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted where they change nothing, see `refusals`
    background: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: Any = None
    max_tool_calls: Any = None


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/inference/v1/abort_requests``."""

    request_ids: Annotated[list[ClientId], Meta(max_length=MAX_ABORTED)]


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: Any = None
    tool_choice: Any = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None


class PromptTokensDetails(Struct, kw_only=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """What completion tokens were spent on."""

    reasoning_tokens: int


class Timing(Struct, kw_only=True):
    """Where the time of the slowest answer went in the engine, in milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    num_preemptions: int


class Usage(Struct, kw_only=True, omit_defaults=True):
    """What a request used; a prompt counts once whatever ``n``. The details of answers are there for chats alone.

    ``timing`` is there when it was asked for and the engine had begun.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    timing: Timing | None = None


def make_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> Usage:
    """The usage of a request; ``reasoning_tokens`` is ``None`` where reasoning is not told apart."""
    total = prompt_tokens + completion_tokens
    details = PromptTokensDetails(cached_tokens=cached_tokens)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=total,
        prompt_tokens_details=details,
        completion_tokens_details=(
            None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        ),
    )


REQUEST_BODIES: dict[str, type[Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/inference/v1/generate": GenerateRequest,
    "/inference/v1/abort_requests": AbortRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in REQUEST_BODIES.values()
}
