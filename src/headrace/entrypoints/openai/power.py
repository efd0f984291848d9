"""Sleeping and waking over HTTP, with the names and parameters that vLLM has; every route asks for the key.

While the engine sleeps new requests are refused (503 with ``Retry-After``) and ``/ready`` is off.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.errors import ApiError
from headrace.entrypoints.openai.insight import ask

LEVELS = ("1", "2")
MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _check(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidRequestError(f"{name} must be {' or '.join(allowed)}", param=name)
    return value


async def sleep(context: ServerContext, request: Request) -> Response:
    """``POST /sleep?level=1&mode=abort``."""
    level = int(_check("level", request.query_params.get("level", "1"), LEVELS))
    mode = _check("mode", request.query_params.get("mode", "abort"), MODES)
    try:
        await context.llm.sleep(level, mode)
    except TimeoutError:
        raise ApiError(503, "the engine did not fall asleep in time; it is awake") from None
    return _json({"status": "sleeping", "level": level})


async def wake_up(context: ServerContext, request: Request) -> Response:
    """``POST /wake_up?tags=weights&tags=kv_cache``; everything without tags."""
    tags = [_check("tags", tag, TAGS) for tag in request.query_params.getlist("tags")]
    try:
        awake = await context.llm.wake(tags)
    except TimeoutError:
        raise ApiError(503, "the engine did not wake up in time; /is_sleeping says when it has") from None
    return _json({"status": "awake" if awake else "sleeping", "tags": tags or list(TAGS)})


async def is_sleeping(context: ServerContext, request: Request) -> Response:
    """``GET /is_sleeping``."""
    state = await ask(context, "state")
    return _json({"is_sleeping": state["state"] == "sleeping"})
