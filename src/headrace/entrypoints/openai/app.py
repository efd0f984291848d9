"""The application: which path leads to which handler, and what every request passes on its way.

`Edge` stands in front of all routes: it names the request, checks the key, refuses work while draining, and counts what
is in flight. Handlers return responses or raise; `errors.describe` turns what they raise into an answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import headrace
from headrace.base.errors import NotAcceptingError
from headrace.entrypoints.dashboard import feed
from headrace.entrypoints.dashboard.static import FILES, serve_file
from headrace.entrypoints.openai import generate, insight, models, power, responses, responses_store, tokenize, tokens
from headrace.entrypoints.openai.auth import OPEN_PATHS, KeyGuard
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.docs_page import show_docs
from headrace.entrypoints.openai.errors import ApiError, describe
from headrace.entrypoints.openai.openapi import make_document
from headrace.entrypoints.openai.protocol import MAX_ID_CHARS
from headrace.entrypoints.openai.sse import ClientGone
from headrace.observability.marks import CURRENT, Marks
from headrace.observability.metrics import CONTENT_TYPE

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

CLIENT_GONE_STATUS = 499
FEED_PATH = "/v1/dashboard/feed"
WHILE_DRAINING = frozenset({"/inference/v1/abort_requests"})
"""What is posted and brings no new work."""


def json_response(value: Any, status: int = 200) -> Response:
    """``value`` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Edge:
    """ASGI middleware that every request passes.

    Args:
        app: the routes.
        context: state of the server.
        guard: who may call.
    """

    def __init__(self, app: ASGIApp, context: ServerContext, guard: KeyGuard) -> None:
        self._app = app
        self._context = context
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
            await send(message)

        state["request_id"] = uuid.uuid4().hex
        try:
            state["request_id"] = _client_id(headers.get(b"x-request-id")) or state["request_id"]
            self._check(scope, headers)
        except Exception as error:  # noqa: BLE001 - a border: whatever is wrong becomes the answer
            await describe(error, state["request_id"]).response()(scope, receive, send_named)
            return
        # A dashboard that looks on is no work, and nothing to wait for at the end.
        counted = scope["path"] not in OPEN_PATHS and scope["path"] != FEED_PATH
        self._context.num_in_flight += counted
        marks = Marks(self._context.llm.now(), http=True, owner=self._guard.owner(headers.get(b"authorization")))
        CURRENT.set(marks)
        try:
            await self._app(scope, receive, send_named)
        finally:
            marks.delivered = self._context.llm.now()
            self._context.num_in_flight -= counted

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._guard.allows(scope["path"], headers.get(b"authorization")):
            raise ApiError(401, "a valid API key is required in the Authorization header", code="invalid_api_key")
        if self._context.draining and scope["method"] == "POST" and scope["path"] not in WHILE_DRAINING:
            raise NotAcceptingError("the server is shutting down and takes no new requests")


def _client_id(header: bytes | None) -> str | None:
    """The client's own name for its request."""
    if not header:
        return None
    if len(header) > MAX_ID_CHARS or not all(0x21 <= byte < 0x7F for byte in header):
        message = f"X-Request-Id must be at most {MAX_ID_CHARS} printable ASCII characters"
        raise ApiError(400, message, param="X-Request-Id")
    return header.decode()


async def _health(context: ServerContext, request: Request) -> Response:
    illness = context.illness()
    return Response(status_code=200) if illness is None else _unavailable(illness)


async def _ready(context: ServerContext, request: Request) -> Response:
    if context.draining:
        return _unavailable("the server is shutting down")
    if context.llm.asleep:
        return _unavailable("the engine sleeps")
    illness = context.illness()
    return Response(status_code=200) if illness is None else _unavailable(illness)


def _unavailable(message: str) -> Response:
    return describe(ApiError(503, message, code="unavailable")).response()


async def _version(context: ServerContext, request: Request) -> Response:
    return json_response({"version": headrace.__version__})


async def _load(context: ServerContext, request: Request) -> Response:
    # This very request is in flight too, but it is not load.
    return json_response({"server_load": context.num_in_flight - 1})


async def _metrics(context: ServerContext, request: Request) -> Response:
    return Response(context.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def _docs(context: ServerContext, request: Request) -> Response:
    return show_docs(openapi_document())


def _file_at(path: str) -> Handler:
    async def handler(context: ServerContext, request: Request) -> Response:
        return serve_file(path)

    return handler


ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/health", _health),
    ("GET", "/ready", _ready),
    ("GET", "/version", _version),
    ("GET", "/load", _load),
    ("GET", "/metrics", _metrics),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model:path}", models.get_model),
    ("POST", "/v1/completions", generate.complete),
    ("POST", "/v1/chat/completions", generate.chat),
    ("POST", "/v1/responses", responses.respond),
    ("GET", "/v1/responses/{response_id}", responses_store.retrieve),
    ("DELETE", "/v1/responses/{response_id}", responses_store.delete),
    ("GET", "/v1/responses/{response_id}/input_items", responses_store.list_input),
    ("POST", "/v1/completions/render", tokens.render_completion),
    ("POST", "/v1/chat/completions/render", tokens.render_chat),
    ("POST", "/inference/v1/generate", tokens.generate_tokens),
    ("POST", "/inference/v1/abort_requests", tokens.abort_requests),
    ("GET", "/v1/requests", insight.list_requests),
    ("GET", "/v1/requests/{request_id:path}/explain", insight.explain),
    ("GET", "/v1/steps", insight.steps),
    ("GET", "/v1/trace", insight.trace),
    ("GET", "/v1/dashboard/setup", feed.setup),
    ("GET", FEED_PATH, feed.follow),
    ("POST", "/start_profile", insight.start_profile),
    ("POST", "/stop_profile", insight.stop_profile),
    ("POST", "/sleep", power.sleep),
    ("POST", "/wake_up", power.wake_up),
    ("GET", "/is_sleeping", power.is_sleeping),
    ("GET", "/docs", _docs),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    *(("GET", path, _file_at(path)) for path in FILES),
]


def _endpoint(context: ServerContext, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(context, request)
        except ClientGone:
            return Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:  # noqa: BLE001 - the border between a request and the server
            return describe(error, request.state.request_id).response()

    return endpoint


def openapi_document() -> dict[str, Any]:
    """The OpenAPI page of this server."""
    return make_document((method, path) for method, path, _ in ROUTES)


def make_app(context: ServerContext) -> ASGIApp:
    """Return the application for a server."""
    app = FastAPI(title="headrace", docs_url=None, redoc_url=None)
    app.root_path = context.options.root_path
    app.openapi = openapi_document  # type: ignore[method-assign]
    for method, path, handler in ROUTES:
        app.add_route(path, _endpoint(context, handler), methods=[method])

    async def refuse(request: Request, error: Exception) -> Response:
        return describe(error, request.state.request_id).response()

    app.add_exception_handler(HTTPException, refuse)
    edge: ASGIApp = Edge(app, context, KeyGuard(context.options.api_key))
    if context.options.allowed_origin:
        origins = list(context.options.allowed_origin)
        edge = CORSMiddleware(edge, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return edge
