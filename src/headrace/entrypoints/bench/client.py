"""A streaming client of OpenAI's API that costs little: one connection per request, parsed in C.

Built on an asyncio protocol, httptools and msgspec, so that hundreds of streams leave most of a core to the server they
measure. Each event is stamped when its bytes arrive.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from headrace.base.errors import ConfigError
from headrace.entrypoints.bench.statistics import RequestRecord

_MAX_ERROR_BODY = 4096


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)))


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests.

    Attributes:
        prefix: path of the API's root, such as ``/v1``.
    """

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None

    @classmethod
    def from_url(cls, url: str, api_key: str | None = None) -> Target:
        """From a base URL with or without ``/v1``.

        Raises:
            ConfigError: not an http or https URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: needs the form http://host:port")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, prefix, api_key)

    def head(self, method: str, path: str, length: int) -> bytes:
        """Request line and headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: */*",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()


class RequestError(Exception):
    """A request failed; ``kind`` is a few words under which failures are counted."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


class _Exchange(asyncio.Protocol):
    """One request and its answer; ``done`` resolves when the answer is complete or cannot be."""

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self._request = request
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._error_body = b""
        self.status = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error.__context__, RequestError) else None
            self._fail(cause or RequestError("not HTTP", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self.status == 200:
            # Some servers end a stream by closing; whether it was whole, its last event tells.
            self.on_message_complete()
        else:
            self._fail(RequestError("connection lost", str(error or "the server closed the connection")))

    # What httptools calls.

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self._on_body(body)
        elif len(self._error_body) < _MAX_ERROR_BODY:
            self._error_body += body

    def on_message_complete(self) -> None:
        if self.status != 200:
            self._fail(RequestError(f"HTTP {self.status}", self._error_body.decode("utf-8", "replace")))
        elif not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _EventReader:
    """Reads server-sent events into a record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._rest = b""
        self.complete = False

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now)

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            raise RequestError("bad event", str(error)) from None
        if event.error is not None:
            raise RequestError("error event", str(event.error))
        record = self._record
        if any(choice.has_output for choice in event.choices):
            record.token_times.append(now)
        if event.usage is not None:
            details = event.usage.prompt_tokens_details
            record.num_prompt_tokens = event.usage.prompt_tokens
            record.num_output_tokens = event.usage.completion_tokens or 0
            record.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0


class BenchClient:
    """Sends requests to one server.

    Args:
        timeout_s: for a whole request.
    """

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if target.tls else None

    async def stream(self, path: str, body: bytes, record: RequestRecord) -> None:
        """POST a streaming request and fill its record, failures included."""
        reader = _EventReader(record)
        record.sent = time.perf_counter()
        try:
            await self._exchange("POST", path, body, reader.feed)
            if not reader.complete:
                raise RequestError("incomplete", "the stream ended without [DONE]")
        except RequestError as error:
            record.error, record.message = error.kind, str(error)
        finally:
            record.end = time.perf_counter()
            record.num_output_tokens = record.num_output_tokens or len(record.token_times)

    async def get(self, path: str) -> bytes:
        """GET a whole answer.

        Raises:
            RequestError: any failure.
        """
        pieces: list[bytes] = []
        await self._exchange("GET", path, b"", pieces.append)
        return b"".join(pieces)

    async def _exchange(self, method: str, path: str, body: bytes, on_body: Callable[[bytes], None]) -> None:
        target = self._target
        request = target.head(method, path, len(body)) + body
        try:
            async with asyncio.timeout(self._timeout_s):
                transport, exchange = await asyncio.get_running_loop().create_connection(
                    lambda: _Exchange(request, on_body), target.host, target.port, ssl=self._tls
                )
                try:
                    await exchange.done
                finally:
                    transport.abort()
        except TimeoutError:
            raise RequestError("timeout", f"no complete answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise RequestError("cannot connect", str(error)) from None
