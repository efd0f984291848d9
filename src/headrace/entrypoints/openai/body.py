"""Reading a request's body: bounded, JSON only, with the first fault named and nothing echoed.

Parsing lets nothing else in the process run until it is done, so what one body may hold is bounded before: by counting,
which is quick whatever it holds, and in several calls on a thread, between which streams go on.
"""

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
SMALL_BYTES = 64 << 10
"""Bodies up to this size cannot hold enough to hold anybody up."""
MAX_ITEMS = 100_000
"""Most texts (names of fields included), objects and lists of a body."""
MAX_VALUES = 1 << 20
"""Most values of every kind, such as token ids."""
MAX_FIELD_BYTES = 2 << 20
LONG_FIELDS = frozenset({"prompt", "messages", "input", "instructions", "token_ids", "tokens"})
"""What may be as long as the body: what the model reads."""

T = TypeVar("T", bound=msgspec.Struct)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

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
    too_large = ApiError(
        413, f"the body is larger than {limit} bytes, which is the server's --max-body", code="body_too_large"
    )
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
    data = await read_body(request, context.options.max_body)
    if len(data) > SMALL_BYTES:
        await context.llm.run_beside(check_size, data)
    return parse(data, kind)


def check_size(data: bytes) -> None:
    """Raise `InvalidRequestError` for a body that would take long to parse, or a field that would take long to check.

    What is no JSON is left for `parse` to tell.
    """
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    num_items = bare.count(b'"') // 2
    num_values = 0
    if num_items <= MAX_ITEMS:
        outside = b"".join(bare.split(b'"')[::2])
        num_items += outside.count(b"{") + outside.count(b"[")
        num_values = outside.count(b",")
    if num_items > MAX_ITEMS or num_values > MAX_VALUES:
        message = f"the body holds more than {MAX_ITEMS} texts, objects and lists, or more than {MAX_VALUES} values"
        raise InvalidRequestError(message, code="body_too_complex")
    try:
        fields = _FIELDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for name, raw in fields.items():
        if len(raw) > MAX_FIELD_BYTES and name not in LONG_FIELDS:
            message = f"{name[:64]} must not be longer than {MAX_FIELD_BYTES} bytes"
            raise InvalidRequestError(message, param=name)


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
