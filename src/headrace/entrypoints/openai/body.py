"""Reading a request's body: bounded, JSON only, with the first fault named and nothing echoed."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.errors import ApiError
from headrace.entrypoints.openai.protocol import DECODERS
from headrace.entrypoints.openai.sse import ClientGone

if TYPE_CHECKING:
    from headrace.entrypoints.openai.context import ServerContext

BODY_TIMEOUT_S = 60.0

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_GUIDED = re.compile(r"guided_\w+$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body; one longer than ``limit`` bytes, announced or not, and one that stops coming are refused."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def check_content_type(request: Request) -> None:
    """Only JSON is read; a body without a type counts as JSON."""
    content_type = request.headers.get("content-type", "application/json")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "the body must be JSON with Content-Type application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "the body must not be compressed; leave Content-Encoding out")


async def read(context: ServerContext, request: Request, kind: type[T]) -> T:
    """Return a request's body as ``kind``, with all checks of this module."""
    check_content_type(request)
    return parse(await read_body(request, context.options.max_body), kind)


def parse(data: bytes, kind: type[T]) -> T:
    """Return the parsed body.

    Raises:
        InvalidRequestError: not JSON, a wrong type, a missing or an unknown field; the field is named.
    """
    try:
        parsed: T = DECODERS[kind].decode(data)
        return parsed
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequestError("the body is not valid JSON", code="invalid_json") from None


def convert(value: Any, kind: type[T]) -> T:
    """`parse` for a body that was put together here."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def _explain(text: str) -> InvalidRequestError:
    """From msgspec's words to a field and a sentence."""
    match = _PATH.search(text)
    path = match["path"] if match else ""
    if match:
        text = text[: match.start()]
    if unknown := _UNKNOWN.search(text):
        name = _join(path, unknown["name"])
        hint = "; use structured_outputs" if _GUIDED.match(name) else ""
        return InvalidRequestError(f"unknown field '{name[:64]}'{hint}", param=name, code="unknown_parameter")
    if missing := _MISSING.search(text):
        name = _join(path, missing["name"])
        return InvalidRequestError(f"{name} is missing", param=name, code="missing_parameter")
    where = path or "the body"
    return InvalidRequestError(f"{where[:64]}: {text[:1].lower()}{text[1:200]}", param=path or None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
