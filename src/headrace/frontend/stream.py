"""The border between the output task and one consumer: a slot that holds one merged output.

The producer never waits: what arrives while the consumer is slow is merged where it is kept (the request's state), so
memory is bounded by the answer itself. `OutputStream` owns only the wake-up and the ways a stream can end: a finished
output, an error, or the consumer leaving. It calls back exactly once when the consumer is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.messages.request_output import RequestOutput


class MergedSource(Protocol):
    """Keeps what has not been consumed yet."""

    def take(self) -> RequestOutput | None:
        """Return everything new as one output, or ``None`` when there is nothing."""
        ...

    @property
    def has_heavy_work(self) -> bool:
        """Whether the next `take` should be prepared beside the event loop."""
        ...

    def prepare(self) -> None:
        """The heavy part of the next `take`; runs in another thread."""
        ...


class OutputStream:
    """Asynchronous iterator of one request's outputs, for one consumer.

    Args:
        source: where the merged output is kept.
        on_close: called once, when the stream has ended or the consumer has left.
        run_beside: runs work in another thread.
    """

    __slots__ = ("_closed", "_error", "_on_close", "_run_beside", "_source", "_waiter")

    def __init__(
        self,
        source: MergedSource,
        on_close: Callable[[], None],
        run_beside: Callable[[Callable[[], None]], Awaitable[None]] | None = None,
    ) -> None:
        self._run_beside = run_beside
        self._source = source
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._closed = False

    def notify(self) -> None:
        """Say that there is something to take. Never blocks."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error instead of what was still to take."""
        if self._error is None:
            self._error = error
        self.notify()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output; raises the stream's error. Leaving in any way but a return closes the stream."""
        while not self._closed:
            try:
                if self._error is not None:
                    raise self._error
                if self._run_beside is not None and self._source.has_heavy_work:
                    await self._run_beside(self._source.prepare)
                    continue
                output = self._source.take()
                if output is not None:
                    if output.finished:
                        self.close()
                    return output
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            except BaseException:
                self.close()
                raise
            finally:
                self._waiter = None
        raise StopAsyncIteration

    def close(self) -> None:
        """The consumer leaves. Idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close()

    async def aclose(self) -> None:
        """Same as `close`, for ``contextlib.aclosing``."""
        self.close()
