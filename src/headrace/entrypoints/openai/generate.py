"""The handlers of the generating routes: read, check, then answer whole or as a stream.

A stream's status is sent with its first event, so that whatever fails before the first token is a plain error answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.body import read
from headrace.entrypoints.openai.chat import ChatCall
from headrace.entrypoints.openai.completions import CompletionCall
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.generation import Work
from headrace.entrypoints.openai.protocol import ChatRequest, CompletionRequest
from headrace.entrypoints.openai.sse import EventStream, until_hangup

MakeStream = Callable[[bytes, AsyncGenerator[bytes, None]], EventStream]


class Call(Protocol):
    """A checked request."""

    @property
    def work(self) -> Work:
        """What is sent to the engine."""
        ...

    async def collect(self) -> None:
        """Wait for all that a whole answer needs."""
        ...

    def build(self) -> dict[str, Any]:
        """The whole answer, after `collect`."""
        ...

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Its events."""
        ...


async def complete(context: ServerContext, request: Request) -> Response:
    """``POST /v1/completions``."""
    body = await read(context, request, CompletionRequest)
    call = await CompletionCall.prepare(context, body, name_request(request, body.request_id))
    return await deliver(context, call, request, bool(body.stream))


async def chat(context: ServerContext, request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    body = await read(context, request, ChatRequest)
    call = await ChatCall.prepare(context, body, name_request(request, body.request_id))
    return await deliver(context, call, request, bool(body.stream))


def name_request(request: Request, given: str | None) -> str:
    """The request's id: the body's (``given``), else the header's, else a new one."""
    if given is not None:
        # It travels in a response header too.
        if not (given.isascii() and given.isprintable()):
            raise InvalidRequestError("request_id must be printable ASCII text", param="request_id")
        request.state.request_id = given
    name: str = request.state.request_id
    return name


async def answer(context: ServerContext, call: Call) -> bytes:
    """The whole answer as JSON; a large one is built beside the event loop."""
    await call.collect()
    if call.work.is_heavy:
        return await context.llm.run_beside(lambda: msgspec.json.encode(call.build()))
    return msgspec.json.encode(call.build())


async def deliver(
    context: ServerContext, call: Call, request: Request, stream: bool, make_stream: MakeStream = EventStream
) -> Response:
    """Answer whole or as a stream."""
    if not stream:
        data = await until_hangup(answer(context, call), request.receive)
        return Response(data, media_type="application/json")
    events = call.stream()
    try:
        first = await until_hangup(anext(events, b""), request.receive)
    except BaseException:
        await events.aclose()
        raise
    return make_stream(first, events)
