"""Tokens in, tokens out: what routers use to tokenise once, place a request, and generate from its ids.

``/v1/completions/render`` and ``/v1/chat/completions/render`` go the way of their routes up to the engine's door and
answer with what would be sent there: bodies for ``/inference/v1/generate``, which gives the same answer in token ids.
``/inference/v1/abort_requests`` ends requests by the names that their clients gave them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.auth import get_owner
from headrace.entrypoints.openai.body import read
from headrace.entrypoints.openai.chat import ChatCall
from headrace.entrypoints.openai.completions import CompletionCall
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.generate import deliver, name_request
from headrace.entrypoints.openai.generation import UsageCounter, Work, check_output
from headrace.entrypoints.openai.logprobs import LOWEST, prompt_logprobs_json
from headrace.entrypoints.openai.protocol import AbortRequest, ChatRequest, CompletionRequest, GenerateRequest
from headrace.entrypoints.openai.refusals import check_refusals
from headrace.entrypoints.openai.sampling import DEFAULTABLE, check_stream_fields
from headrace.entrypoints.openai.sse import event
from headrace.messages.request_output import CompletionOutput, PositionLogprobs, RequestOutput
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams

PREFIXES = ("", "cmpl-", "chatcmpl-", "resp_")


async def render_completion(context: ServerContext, request: Request) -> Response:
    """``POST /v1/completions/render``: one generate body per prompt."""
    body = await read(context, request, CompletionRequest)
    call = await CompletionCall.prepare(context, body, name_request(request, body.request_id))
    return _json(_rendered(call.work, call.model))


async def render_chat(context: ServerContext, request: Request) -> Response:
    """``POST /v1/chat/completions/render``: the generate body of a chat."""
    body = await read(context, request, ChatRequest)
    call = await ChatCall.prepare(context, body, name_request(request, body.request_id))
    return _json(_rendered(call.work, call.model)[0])


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _rendered(work: Work, model: str) -> list[dict[str, Any]]:
    sampling = msgspec.to_builtins(work.sampling, str_keys=True)
    sampling.pop("output_kind", None)
    # Spelt out, so that the model's own defaults do not take the place of neutral values.
    sampling |= {name: getattr(work.sampling, name) for name in (*sorted(DEFAULTABLE), "max_tokens")}
    many = len(work.prompts) > 1
    shared = {"model": model, "sampling_params": sampling, "features": None, "stream": bool(work.body.stream)}
    if work.body.stream_options is not None:
        shared["stream_options"] = work.body.stream_options
    for name in ("priority", "cache_salt"):
        if getattr(work.body, name) is not None:
            shared[name] = getattr(work.body, name)
    return [
        {"request_id": f"{work.answer_id}-{place}" if many else work.answer_id, "token_ids": prompt.token_ids, **shared}
        for place, prompt in enumerate(work.prompts)
    ]


async def generate_tokens(context: ServerContext, request: Request) -> Response:
    """``POST /inference/v1/generate``."""
    body = await read(context, request, GenerateRequest)
    call = await TokenCall.prepare(context, body, name_request(request, body.request_id))
    return await deliver(context, call, request, bool(body.stream))


async def abort_requests(context: ServerContext, request: Request) -> Response:
    """``POST /inference/v1/abort_requests``: ends what the key sent under one of the names; others are ignored."""
    body = await read(context, request, AbortRequest)
    names = [prefix + name for name in body.request_ids for prefix in PREFIXES]
    return _json({"num_aborted": await context.llm.abort(names, owner=get_owner())})


def make_token_sampling(body: GenerateRequest, defaults: dict[str, Any]) -> SamplingParams:
    """The request's values, else the model's defaults, else neutral ones."""
    values = {name: defaults[name] for name in DEFAULTABLE if defaults.get(name) is not None}
    given: dict[str, Any] = {} if body.sampling_params is None else msgspec.structs.asdict(body.sampling_params)
    for name, value in given.items():
        if value is not msgspec.UNSET and (value is not None or name == "max_tokens"):
            values[name] = value
    if body.output_mode == "tokens" and not values.get("stop"):
        values["detokenize"] = False
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, output_kind=kind)


@dataclass
class TokenCall:
    """One request of this route, from its checked body to its answer."""

    context: ServerContext
    body: GenerateRequest
    work: Work
    counter: UsageCounter = field(default_factory=UsageCounter)
    _final: RequestOutput | None = None

    @classmethod
    async def prepare(cls, context: ServerContext, body: GenerateRequest, request_id: str) -> TokenCall:
        """Check everything; nothing is queued yet."""
        check_refusals(body)
        check_stream_fields(body)
        context.check_model(body.model)
        if body.features is not None and any(body.features.values()):
            raise InvalidRequestError("features: this model takes text only", param="features")
        sampling = make_token_sampling(body, dict(context.sampling_defaults))
        if body.stream and sampling.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        try:
            prompt = await context.llm.tokenize(body.token_ids)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param="token_ids", code=error.code) from None
        return cls(context, body, Work(request_id, [prompt], sampling, body))

    async def collect(self) -> None:
        """Wait for the output."""
        async for _, output in self.work.run(self.context):
            self._final = output

    def build(self) -> dict[str, Any]:
        """The whole answer from what was collected."""
        final = self._final
        assert final is not None
        answer = self._chunk(final)
        answer["usage"] = self.counter.usage()
        answer["prompt_logprobs"] = prompt_logprobs_json(final.prompt_logprobs)
        answer["kv_transfer_params"] = final.kv_transfer_params
        return answer

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events of the answer, without ``[DONE]``."""
        options = self.body.stream_options
        async for _, output in self.work.run(self.context):
            chunk = self._chunk(output)
            if options and options.continuous_usage_stats:
                chunk["usage"] = self.counter.usage()
            yield event(chunk)
        if options and options.include_usage:
            yield event({"request_id": self.work.answer_id, "choices": [], "usage": self.counter.usage()})

    def _chunk(self, output: RequestOutput) -> dict[str, Any]:
        choices = []
        for one in output.outputs:
            check_output(one)
            self.counter.add(0, output, len(one.token_ids))
            choices.append(self._choice(one))
        return {"request_id": self.work.answer_id, "choices": choices}

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "token_ids": one.token_ids,
            "logprobs": None if one.logprobs is None else [_candidates(position) for position in one.logprobs],
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self.body.output_mode == "text":
            choice["text"] = one.text
        return choice


def _candidates(position: PositionLogprobs) -> list[dict[str, Any]]:
    """One position, the chosen token first."""
    return [
        {"token_id": token_id, "logprob": max(entry.logprob, LOWEST), "rank": entry.rank}
        for token_id, entry in position.items()
    ]
