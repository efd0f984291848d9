"""From a body's fields to `SamplingParams`: the request's value, else the model's default, else the neutral one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection
from headrace.entrypoints.openai.protocol import DeliveryFields, GenerationFields
from headrace.frontend.validation import check_count
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputParams

DEFAULTABLE = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
_READ_OTHERWISE = frozenset({"max_tokens", "logit_bias", "structured_outputs"})
_SAME_NAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationFields.__struct_fields__ and name not in _READ_OTHERWISE
)


def make_sampling(
    body: GenerationFields,
    defaults: Mapping[str, Any],
    most: LimitsSection,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    constraint: StructuredOutputParams | None = None,
) -> SamplingParams:
    """Return the parameters of a request.

    Args:
        body: the request.
        defaults: the model's own sampling defaults (from ``generation_config.json``).
        most: what the operator allows.
        max_tokens: the limit in force; ``None`` is the room that the context leaves.
        logprobs: candidates per token, or ``None``.
        prompt_logprobs: overrides the body's.
        constraint: what the output is held to.
    """
    values: dict[str, Any] = {name: defaults[name] for name in DEFAULTABLE if defaults.get(name) is not None}
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.logit_bias:
        check_count("logit_bias", len(body.logit_bias), most.max_biased_tokens)
        values["logit_bias"] = _parse_bias(body.logit_bias)
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs
    if constraint is not None:
        values["structured_outputs"] = constraint
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)


def _parse_bias(biases: dict[str, float]) -> dict[int, float]:
    """JSON keys are strings; plain decimal ids only, so that no two keys can mean one token."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def check_stream_fields(body: DeliveryFields) -> None:
    """Refuse what contradicts the way of delivery."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise InvalidRequestError(f"{name}: streams are not padded", param=name, code="unsupported_parameter")
