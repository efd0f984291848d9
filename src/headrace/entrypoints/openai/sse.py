"""Server-sent events and hang-ups.

A streamed token costs one join of prebuilt bytes: everything of a chunk but the text is encoded once per choice. The
response races its producer against the client's hang-up, so that leaving ends the generator, and with it the request,
at once instead of at the next write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.entrypoints.openai.errors import describe

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client hung up before it had its answer."""


def event(value: Any) -> bytes:
    """One event that carries ``value`` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """One event that is named by the ``type`` of its value."""
    return b"event: " + value["type"].encode() + b"\ndata: " + _encode(value) + b"\n\n"


class ChunkTemplate:
    """The bytes of a chunk around its text.

    Args:
        before: JSON up to the text.
        after: JSON from the text to the end of the chunk.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = b"data: " + before
        self._after = after + b"\n\n"

    @classmethod
    def around(cls, chunk: dict[str, Any], marker: str) -> ChunkTemplate:
        """Cut the encoding of ``chunk`` at the one string that is ``marker``."""
        before, found, after = _encode(chunk).partition(_encode(marker))
        assert found, marker
        return cls(before, after)

    def fill(self, text: str) -> bytes:
        """The event with ``text``."""
        return self._before + _encode(text) + self._after


async def _wait_for_hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_hangup(work: Awaitable[T], receive: Receive) -> T:
    """Run ``work`` and return its result; when the client hangs up first, cancel it and raise `ClientGone`.

    The request's body must have been read, for what remains of it would be taken for silence.
    """
    task = asyncio.ensure_future(work)
    hangup = asyncio.ensure_future(_wait_for_hangup(receive))
    try:
        await asyncio.wait({task, hangup}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, hangup):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await pending


class EventStream(Response):
    """Sends what ``events`` yields; ``[DONE]`` follows a normal end, one error event any other.

    Args:
        first: the events that are there already.
        events: yields encoded events; closed on every way out.
    """

    media_type = "text/event-stream"
    end = DONE

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._request_id = ""

    def _last_words(self, error: Exception) -> bytes:
        """The event that ends a stream which cannot go on."""
        return b"data: " + describe(error, self._request_id).body() + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request_id = scope.get("state", {}).get("request_id", "")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientGone, OSError):
            await until_hangup(self._produce(send), receive)

    async def _produce(self, send: Callable[[Any], Awaitable[None]]) -> None:
        async with aclosing(self._events) as events:
            try:
                if self._first:
                    await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                last = self.end
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - a border: the stream has begun, so any fault becomes its last event
                last = self._last_words(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})
