"""What came back from a core, on the event loop's side: the same for every kind of client.

Owns the pending control calls, the queue of outputs and the reason of death. All methods are called on the event loop's
thread. Bounded by whoever delivers: it must keep at most ``limit`` undelivered messages in flight and is told through
``on_taken`` when one has been taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from headrace.base.errors import ControlFailedError, EngineDeadError
from headrace.messages.outputs import ControlReply, EngineCoreOutputs
from headrace.messages.requests import AnyControl


class Mailbox:
    """See the module.

    Args:
        on_taken: called for each delivered message when it has been taken, or at once if it held only replies.
    """

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self.dead_reason: str | None = None
        self._on_taken = on_taken
        self._messages: deque[EngineCoreOutputs] = deque()
        self._arrival = asyncio.Event()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = count(1)

    def check_alive(self) -> None:
        """Raise `EngineDeadError` with the root cause once the core is gone."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    def deliver(self, message: EngineCoreOutputs) -> None:
        """File a message: replies go to their callers, the rest waits for `get`."""
        for reply in message.replies:
            self._answer(reply)
        if message.dead is not None:
            self.fail(message.dead)
        if message.outputs or message.stats is not None:
            self._messages.append(message)
            self._arrival.set()
        else:
            self._on_taken()

    def fail(self, cause: str) -> None:
        """The core is gone: every waiting call and every later one gets ``cause``. The first cause stays."""
        if self.dead_reason is not None:
            return
        self.dead_reason = cause
        self._arrival.set()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(cause))

    async def get(self) -> EngineCoreOutputs:
        """The next message; what came before death is still handed out."""
        while not self._messages:
            self.check_alive()
            self._arrival.clear()
            await self._arrival.wait()
        self._on_taken()
        return self._messages.popleft()

    async def call(self, request: AnyControl, send: Callable[[AnyControl], Any], timeout_s: float) -> Any:
        """Send ``request`` with a fresh call id through ``send`` (a coroutine function) and wait for its reply."""
        self.check_alive()
        call_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await send(msgspec.structs.replace(request, call_id=call_id))
                return await future
        finally:
            self._calls.pop(call_id, None)

    def _answer(self, reply: ControlReply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(ControlFailedError(reply.error))
        else:
            future.set_result(reply.value)
