"""A small client of a running server, with the standard library only."""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

from headrace.base.errors import HeadraceError
from headrace.config.env import api_key

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
GET_TIMEOUT_S = 60.0


def stream_lines(url: str, key: str | None, body: dict[str, Any]) -> Iterator[str]:
    """POST and yield the data of each event.

    Raises:
        HeadraceError: the server cannot be reached or refuses; with its message.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
    except urllib.error.HTTPError as error:
        raise HeadraceError(_message(error.read()) or f"the server answered {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise HeadraceError(f"cannot talk to {url}: {reason}; is the server running?") from None


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which server to ask."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--api-key", default=api_key(), help="its API key (default: HEADRACE_API_KEY)")


def find_base(url: str) -> str:
    """The address of a server from what the user gave, with or without ``/v1``.

    Raises:
        HeadraceError: not an http or https URL.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or any(char.isspace() for char in url):
        raise HeadraceError(f"'{url}' is no address of a server; it needs the form {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


def get(url: str, key: str | None, path: str) -> bytes:
    """GET and return the body.

    Raises:
        HeadraceError: the server cannot be reached or refuses; with its message.
    """
    request = urllib.request.Request(find_base(url) + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=GET_TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise HeadraceError(_message(error.read()) or f"the server answered {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise HeadraceError(f"cannot talk to {url}: {reason}; is the server running?") from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def chat_deltas(url: str, key: str | None, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
    """The pieces of an answer."""
    body = {"messages": messages, "stream": True, **sampling}
    for data in stream_lines(find_base(url) + "/v1/chat/completions", key, body):
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise HeadraceError(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


async def stream_chat(
    url: str, key: str | None, messages: list[dict[str, str]], sampling: dict[str, Any]
) -> AsyncIterator[str]:
    """`chat_deltas`, read in another thread."""
    pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for piece in chat_deltas(url, key, messages, sampling):
                pieces.put(piece)
            pieces.put(None)
        except BaseException as error:  # noqa: BLE001 - handed over to the one who waits
            pieces.put(error)

    threading.Thread(target=read, daemon=True).start()
    loop = asyncio.get_running_loop()
    while True:
        item = await loop.run_in_executor(None, pieces.get)
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        yield item
