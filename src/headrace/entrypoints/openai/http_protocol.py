"""uvicorn's HTTP protocol with bounds on what comes before a body: how many bytes, and how long they may take.

A connection must bring a whole head within the time from its first byte (or, when new, from its opening); one that
does not is closed. Bodies have bounds of their own, see `body`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """See the module. What arrives in one read counts as a whole, so a head may be one read larger than the bound."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._close()
                return
            self._head_bytes += len(data)
            self._start_timer()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()
