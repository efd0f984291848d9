"""Looking inside over HTTP: why a request was slow, which requests there are, what steps did, a trace of it all.

Every route here asks for the key. Nothing here shows an answer; a prompt only to the key that sent it, when it asks and
the operator has prompts kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.errors import ApiError
from headrace.messages.requests import Profile, Query
from headrace.observability.explain import as_text
from headrace.observability.marks import CURRENT
from headrace.observability.trace import make_trace

QUERY_TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 60.0
MAX_LISTED = 200


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def ask(context: ServerContext, topic: str, argument: str | None = None) -> Any:
    """What the core answers; one that is too busy to answer is a 503."""
    with _in_time():
        return await context.llm.control(Query(topic=topic, argument=argument), QUERY_TIMEOUT_S)


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ApiError(503, "the engine did not answer in time; /health says whether it advances") from None


async def explain(context: ServerContext, request: Request) -> Response:
    """``GET /v1/requests/{id}/explain``; ``?format=text`` for people, ``?prompt=true`` with the prompt."""
    name, form = request.path_params["request_id"], _choice(request, "format", "json", "text")
    with_prompts = _choice(request, "prompt", "false", "true") == "true"
    if with_prompts:
        _check_prompts_shown(context, name)
    with _in_time():
        explanation = await context.llm.explain(name, with_prompts=with_prompts)
    if explanation is None:
        message = "no such request is remembered; the newest thousand are"
        raise ApiError(404, message, param="id", code="request_not_found")
    if form == "text":
        parts = [as_text(answer) for answer in explanation.get("answers", [explanation])]
        parts += [f"prompt\n{prompt}" for prompt in explanation.get("prompts", ())]
        return PlainTextResponse("\n\n".join(parts) + "\n")
    return _json(explanation)


def _choice(request: Request, name: str, *values: str) -> str:
    """One of ``values`` from the query; the first by default."""
    value = request.query_params.get(name, values[0])
    if value not in values:
        raise InvalidRequestError(f"{name} must be {' or '.join(values)}", param=name)
    return value


def _check_prompts_shown(context: ServerContext, name: str) -> None:
    """Raise unless the caller may see the prompts of a request."""
    if not context.llm.config.observability.explain_prompts:
        raise ApiError(403, "this server keeps no prompts; it would with --explain-prompts", param="prompt")
    asked, asking = context.llm.marks.find(name), CURRENT.get()
    if asked is not None and (asking is None or asked.owner != asking.owner):
        raise ApiError(403, "only the key that sent a request may see its prompt", param="prompt")


async def list_requests(context: ServerContext, request: Request) -> Response:
    """``GET /v1/requests``: the latest requests, in short."""
    return _json({"object": "list", "data": await describe_requests(context, MAX_LISTED)})


async def describe_requests(context: ServerContext, count: int) -> list[dict[str, Any]]:
    """The latest requests of the core under their clients' names; times are seconds ago."""
    llm = context.llm
    now = llm.now()
    found = await ask(context, "requests")
    rows = []
    order = {"running": 0, "preempted": 1, "waiting": 2, "finished": 3}
    found.sort(key=lambda one: order[one["state"]])
    num_live = sum(not one["finished"] for one in found)
    # However many wait, some that ended are shown too.
    num_shown = max(count - (len(found) - num_live), count * 3 // 4)
    shown = [*found[: min(num_live, num_shown)], *found[num_live:]]
    for one in shown[:count]:
        end = one["finished"] or now
        rows.append(
            {
                "id": llm.marks.name_of(one["request_id"]),
                "request_id": one["request_id"],
                "state": one["state"],
                "waiting_reason": one["waiting"],
                "finish_reason": one["finish_reason"],
                "num_prompt_tokens": one["num_prompt_tokens"],
                "num_cached_tokens": one["local_hit"],
                "num_output_tokens": one["num_output_tokens"] or context.metrics.num_generated(one["request_id"]),
                "num_preemptions": one["num_preemptions"],
                "age_s": now - one["queued"],
                "length_s": end - one["queued"],
            }
        )
    return rows


async def steps(context: ServerContext, request: Request) -> Response:
    """``GET /v1/steps``: the latest steps, or those ``after`` a step id."""
    after = request.query_params.get("after")
    if after is not None and not (after.isascii() and after.isdigit()):
        raise InvalidRequestError("after must be the id of a step", param="after")
    found = await ask(context, "steps", after)
    return _json({"object": "list", "attention": context.llm.ready.attention, "data": found})


async def trace(context: ServerContext, request: Request) -> Response:
    """``GET /v1/trace``: the latest steps and requests for Perfetto."""
    found = await ask(context, "trace")
    return _json(make_trace(found, context.llm.marks.name_of))


async def start_profile(context: ServerContext, request: Request) -> Response:
    """``POST /start_profile``."""
    return _json(await context.llm.control(Profile(start=True), PROFILE_TIMEOUT_S) or {})


async def stop_profile(context: ServerContext, request: Request) -> Response:
    """``POST /stop_profile``: ends the profile and says where it lies."""
    return _json(await context.llm.control(Profile(start=False), PROFILE_TIMEOUT_S) or {})
