"""A client that sends whatever bytes it is told to, as they are cut, and reads what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httptools


@dataclass
class RawReply:
    """An answer as it arrived; ``status`` is 0 when the server hung up without one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False

    @property
    def kind(self) -> str:
        """The media type."""
        return self.headers.get("content-type", "").partition(";")[0]


class _Reader:
    """What `httptools` tells of a reply; ``100 Continue`` is passed over."""

    def __init__(self) -> None:
        self.reply = RawReply()
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.reply.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.reply.body += data

    def on_message_complete(self) -> None:
        if self.reply.status == 100:
            self.reply = RawReply()
        else:
            self.reply.is_whole = True


async def exchange(url: str, pieces: Sequence[bytes], *, leaves: bool = False, cut: bool = False) -> RawReply:
    """Send ``pieces`` one by one on a connection of its own and read the answer.

    Args:
        url: of the server.
        pieces: all that is sent; the server gets a turn after each.
        leaves: hang up at the first sign of an answer.
        cut: say after the last piece that nothing more will come.
    """
    host, port = url.removeprefix("http://").split(":")
    stream, writer = await asyncio.open_connection(host, int(port))
    reader = _Reader()
    try:
        with suppress(OSError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if cut:
                writer.write_eof()
        with suppress(ConnectionError):
            while not reader.reply.is_whole and (data := await stream.read(1 << 16)):
                if leaves:
                    break
                reader.parser.feed_data(data)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return reader.reply
