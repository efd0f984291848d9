"""The loop that drives an engine core, the same in a process of its own and on a thread.

Owns the order of one turn: take what came in, run a step, hand out what came of it, move the progress word. It knows
nothing of sockets: messages come from an `Inbox` and leave through ``send``. It ends when the core has stopped and
raises when the core is beyond help.

It never spins: with nothing to do it sleeps on the inbox, waking once a second to look after the workers and to tell
the core that it rests, and when requests exist but none can run (KV on its way, grammar compiling) it looks again after
a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, Queue
from typing import TYPE_CHECKING

from headrace.base.errors import EngineDeadError
from headrace.base.progress import ProgressWord
from headrace.messages.outputs import EngineCoreOutputs
from headrace.messages.requests import Abort, EngineCoreRequest, ToCore

if TYPE_CHECKING:
    from headrace.core.engine_core import EngineCore

INBOX_LIMIT = 8192
IDLE_S = 1.0
STALLED_S = 0.002

Send = Callable[[int, EngineCoreOutputs], None]


class Inbox:
    """Messages to a core, in order, from any thread.

    Aborts also take a fast lane that the core reads between a forward and its commit. They stay in the queue too, so
    that one which overtakes its request still finds it. ``put`` blocks while the queue is full.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._queue: Queue[tuple[int, ToCore] | EngineDeadError] = Queue(INBOX_LIMIT)

    @property
    def full(self) -> bool:
        """Whether `put` would block."""
        return self._queue.full()

    def put(self, client_index: int, message: ToCore) -> None:
        """File a message of a client."""
        if isinstance(message, Abort):
            self._core.abort_soon(message.request_ids)
        self._queue.put((client_index, message))

    def fail(self, cause: str) -> None:
        """Nothing more can come in: whoever takes next gets `EngineDeadError`."""
        self._queue.put(EngineDeadError(cause))

    def take(self, timeout_s: float) -> list[tuple[int, ToCore]]:
        """All that has come in, after waiting up to ``timeout_s`` for the first message."""
        messages: list[tuple[int, ToCore]] = []
        try:
            item = self._queue.get(block=timeout_s > 0, timeout=timeout_s or None)
            while True:
                if isinstance(item, EngineDeadError):
                    raise item
                messages.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return messages


class CoreLoop:
    """Runs a core until it stops; see the module."""

    def __init__(self, core: EngineCore, inbox: Inbox, send: Send, progress: ProgressWord) -> None:
        self._core = core
        self._inbox = inbox
        self._send = send
        self._progress = progress

    def run(self) -> None:
        """Serve until a `Stop` verb; raises the cause when a step fails for good."""
        core = self._core
        while not core.stopped:
            self.turn(self._wait_s())

    def turn(self, wait_s: float) -> None:
        """One turn, waiting for messages at most ``wait_s`` before it."""
        messages = self._inbox.take(wait_s)
        if wait_s == IDLE_S and not messages:
            self._core.rest()
        for client_index, message in messages:
            if isinstance(message, EngineCoreRequest):
                self._core.add_request(message)
            else:
                self._core.control(message, client_index)
        for client_index, outputs in self._core.step().items():
            self._send(client_index, outputs)
        self._progress.advance()

    def _wait_s(self) -> float:
        if not self._core.has_work:
            self._core.check_health()
            return IDLE_S
        return STALLED_S if self._core.stalled else 0.0
