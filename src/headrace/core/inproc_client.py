"""Engine cores in this process: on a thread of their own for an event loop, or in the caller's thread.

`InprocClient` owns one thread, which builds the core and runs its loop; messages cross through an `Inbox` and the event
loop's thread-safe calls. `InlineCore` has no thread at all: the caller adds requests and calls `step`, which suits
offline use, where nobody else waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from headrace.base.clock import Clock
from headrace.base.errors import EngineDeadError
from headrace.base.last_words import describe_cause
from headrace.base.logging import get_logger
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.core.build import build_core
from headrace.core.client import EngineCoreClient
from headrace.core.loop import STALLED_S, CoreLoop, Inbox
from headrace.core.mailbox import Mailbox
from headrace.messages.outputs import CoreReady, EngineCoreOutputs
from headrace.messages.requests import (
    Abort,
    AnyControl,
    Drain,
    EngineCoreRequest,
    Stop,
    ToCore,
)

logger = get_logger(__name__)

MAILBOX_LIMIT = 1024
STOP_GRACE_S = 5.0
CROWDED_S = 0.001


class InlineCore:
    """A core that runs when it is told to, in the caller's thread.

    After a fault that ends the core every call raises `EngineDeadError` with the root cause.
    """

    def __init__(self, config: EngineConfig, executor: str, options: dict[str, Any] | None = None) -> None:
        self._progress = ProgressWord()
        self._core = build_core(config, executor, options or {}, self._progress)
        self._dead: str | None = None

    @property
    def ready(self) -> CoreReady:
        """The final numbers."""
        return self._core.ready

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something."""
        return self._dead is None and self._core.has_work

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._check_alive()
        self._core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored."""
        if self._dead is None:
            self._core.abort_soon(request_ids)

    def step(self) -> EngineCoreOutputs:
        """Run one step and return what came of it; pauses when all there is must wait for others."""
        self._check_alive()
        if self._core.stalled:
            time.sleep(STALLED_S)
        try:
            outputs = self._core.step().get(0)
        except Exception as error:
            self._dead = describe_cause(error)
            self.shutdown()
            raise EngineDeadError(self._dead) from error
        return outputs if outputs is not None else EngineCoreOutputs()

    def control(self, request: AnyControl) -> Any:
        """Apply a verb that answers at once (every one but `Drain`) and return its value; raises what it fails with."""
        self._check_alive()
        return self._core.perform(request)

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        if self._dead is None:
            self._dead = "the engine was shut down"
        self._core.shutdown()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)


class InprocClient(EngineCoreClient):
    """A core on a thread of this process.

    Args:
        config: of the engine.
        executor: dotted path of the executor's factory.
        options: plain data for the factory.
        clock: the machine's by default.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: str,
        options: dict[str, Any] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._config, self._executor, self._options, self._clock = (
            config,
            executor,
            options or {},
            clock,
        )
        self._progress = ProgressWord()
        self._room = threading.Semaphore(MAILBOX_LIMIT)
        self._mailbox = Mailbox(self._room.release)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine-core", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[tuple[CoreReady, Inbox]] | None = None
        self._inbox: Inbox | None = None

    async def start(self) -> CoreReady:
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        ready, self._inbox = await self._ready
        return ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._mailbox.check_alive()
        await self._send(request)

    async def abort(self, request_ids: list[str]) -> None:
        if request_ids and self._mailbox.dead_reason is None:
            await self._send(Abort(request_ids=request_ids))

    async def control(self, request: AnyControl, timeout_s: float = 60.0) -> Any:
        return await self._mailbox.call(request, self._send, timeout_s)

    async def get_output(self) -> EngineCoreOutputs:
        return await self._mailbox.get()

    @property
    def dead_reason(self) -> str | None:
        return self._mailbox.dead_reason

    def progress(self) -> int:
        return self._progress.read()

    async def shutdown(self, drain_s: float = 0.0) -> None:
        if self._inbox is not None and self._mailbox.dead_reason is None:
            if drain_s > 0:
                try:
                    await self.control(Drain(), drain_s)
                except (TimeoutError, EngineDeadError):
                    logger.warning("requests still ran when %.0f s of draining were over", drain_s)
            await self._send(Stop())
        self._closing.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, STOP_GRACE_S)
            if self._thread.is_alive():
                logger.warning(
                    "the engine core did not stop within %.0f s; its thread is left behind",
                    STOP_GRACE_S,
                )
        self._mailbox.fail("the engine was shut down")

    async def _send(self, message: ToCore) -> None:
        assert self._inbox is not None, "start() comes first"
        while self._inbox.full:
            self._mailbox.check_alive()
            await asyncio.sleep(CROWDED_S)
        self._inbox.put(0, message)

    def _main(self) -> None:
        """The thread: build, serve, say why it ended."""
        assert self._ready is not None
        try:
            core = build_core(self._config, self._executor, self._options, self._progress, self._clock)
        except BaseException as error:  # noqa: BLE001 - raised again where start() waits
            self._call(_settle, self._ready, error)
            return
        inbox = Inbox(core)
        self._call(_settle, self._ready, (core.ready, inbox))
        try:
            CoreLoop(core, inbox, self._deliver, self._progress).run()
            self._call(self._mailbox.fail, "the engine was shut down")
        except Exception as error:
            logger.exception("the engine core failed")
            self._call(self._mailbox.fail, describe_cause(error))
        finally:
            core.shutdown()

    def _deliver(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Hand a message to the event loop; waits while it takes too slowly."""
        while not self._room.acquire(timeout=1.0):
            if self._closing.is_set():
                return
        self._call(self._mailbox.deliver, outputs)

    def _call(self, function: Any, *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop is closed: nobody is left to tell.
            self._closing.set()


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Resolve a future that may have been cancelled meanwhile."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
