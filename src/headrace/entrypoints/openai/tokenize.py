"""``/tokenize`` and ``/detokenize``: the same ways into and out of tokens that generation takes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.body import read
from headrace.entrypoints.openai.chat import read_plan, render
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
from headrace.entrypoints.openai.refusals import check_refusals
from headrace.frontend.validation import check_token_ids


async def tokenize(context: ServerContext, request: Request) -> Response:
    """``POST /tokenize``: the ids of a text, or of a chat as it would be sent to the model."""
    body = await read(context, request, TokenizeRequest)
    check_refusals(body)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = (await render(context, body, await read_plan(context, body))).token_ids
    else:
        assert body.prompt is not None
        ids = (await context.llm.tokenize(body.prompt, body.add_special_tokens is not False)).token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids}
    answer["token_strs"] = context.pieces(ids) if body.return_token_strs else None
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(context: ServerContext, request: Request) -> Response:
    """``POST /detokenize``: the text of ids, special tokens included."""
    body = await read(context, request, DetokenizeRequest)
    context.check_model(body.model)
    check_token_ids("tokens", body.tokens, context.llm.input.limits)
    text = await context.llm.run_beside(context.decode, body.tokens)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
