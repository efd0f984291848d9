"""`ProcessClient`: an engine core in a process of its own.

The constructor spawns the child at once (or is given one that was spawned before), so that a server can import the
rest of itself meanwhile; `start` waits until the core is ready. The child belongs to this client: it is watched
through its pidfd, and on every way out it is ended, by a message, or by SIGKILL when it does not listen.

The thread that makes the client must live as long as the client: the kernel kills the child with it (see
`core.process`).

This module never imports PyTorch: what runs in the child is named by dotted path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import zmq
import zmq.asyncio

from headrace.base.errors import ConfigError, EngineDeadError, ModelFileError
from headrace.base.last_words import describe_exit
from headrace.base.logging import get_logger
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.core.client import EngineCoreClient
from headrace.core.mailbox import Mailbox
from headrace.core.spawn import CoreProcess
from headrace.core.transport import (
    HIGH_WATER,
    CoreStart,
    from_core_codec,
    input_address,
    output_address,
    to_core_codec,
)
from headrace.messages.outputs import CoreFailed, CoreReady, EngineCoreOutputs, FromCore
from headrace.messages.requests import (
    Abort,
    AnyControl,
    Drain,
    EngineCoreRequest,
    Stop,
    ToCore,
)

logger = get_logger(__name__)

START_TIMEOUT_S = 1800.0
STOP_GRACE_S = 5.0
SEND_TIMEOUT_S = 60.0
CROWDED_S = 0.002
MAILBOX_LIMIT = 1024


class ProcessClient(EngineCoreClient):
    """See the module.

    Args:
        config: of the engine.
        executor: dotted path of the executor's factory (see `CoreStart`).
        options: plain data for the factory.
        child: a process that was spawned earlier; it belongs to this client from now on.
        start_timeout_s: how long loading may take.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: str,
        options: dict[str, Any] | None = None,
        *,
        child: CoreProcess | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._child = child or CoreProcess(executor.partition(":")[0])
        self._process, self._folder = self._child.popen, self._child.folder
        self._progress = ProgressWord(shared=True, folder=self._folder)
        self._context = zmq.Context()
        self._input = self._bind(zmq.PUSH, input_address(self._folder))
        self._output = zmq.asyncio.Socket(self._bind(zmq.PULL, output_address(self._folder)))
        self._to_core = to_core_codec()
        self._from_core = from_core_codec()
        assert self._progress.name is not None
        self._start_message = CoreStart(
            config=config,
            executor=executor,
            options=options or {},
            progress_name=self._progress.name,
            spawned_at=self._child.spawned_at,
        )
        self._exited = asyncio.Event()
        self._room = asyncio.Semaphore(MAILBOX_LIMIT)
        self._mailbox = Mailbox(self._room.release)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    async def start(self) -> CoreReady:
        """Wait until the core can serve.

        Raises:
            ConfigError, ModelFileError: what the core found wrong.
            EngineDeadError: the core died or took too long; the message has the cause.
        """
        try:
            self._tasks.append(asyncio.create_task(self._watch(), name="core-watch"))
            async with asyncio.timeout(self._start_timeout_s):
                await self._send(self._start_message)
                message = await self._first_message()
        except TimeoutError:
            await self._kill()
            raise EngineDeadError(f"the engine core was not ready after {self._start_timeout_s:.1f} s") from None
        except BaseException:
            await self._kill()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._tasks.append(asyncio.create_task(self._read(), name="core-read"))
        return message

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._mailbox.check_alive()
        await self._send(request)

    async def abort(self, request_ids: list[str]) -> None:
        if request_ids and self._mailbox.dead_reason is None and not self._stopping:
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
        self._stopping = True
        try:
            if self._mailbox.dead_reason is None and self._tasks:
                await self._stop(drain_s)
        finally:
            await self._kill()

    async def _stop(self, drain_s: float) -> None:
        """Ask the core to end and give it a moment."""
        try:
            if drain_s > 0:
                await self._mailbox.call(Drain(), self._send, drain_s)
        except (TimeoutError, EngineDeadError):
            logger.warning("requests still ran when %.0f s of draining were over", drain_s)
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._send(Stop())
                await self._exited.wait()
        except TimeoutError:
            logger.warning("the engine core did not stop within %.0f s and is killed", STOP_GRACE_S)

    async def _kill(self) -> None:
        """End the child for certain and release everything; idempotent."""
        self._stopping = True
        self.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._mailbox.fail("the engine was shut down")

    def close(self) -> None:
        """The part of shutting down that needs no event loop: kill, reap, release. Idempotent."""
        self._child.end()
        self._context.destroy(linger=0)
        self._progress.close()

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(HIGH_WATER)
        socket.linger = 0
        socket.bind(address)
        return socket

    async def _send(self, message: ToCore | CoreStart) -> None:
        """Hand a message to the socket; waits while it is full or the core is not connected yet."""
        data = self._to_core.encode(message)
        async with asyncio.timeout(None if isinstance(message, CoreStart) else SEND_TIMEOUT_S):
            while True:
                try:
                    self._input.send(data, zmq.NOBLOCK)
                    return
                except zmq.Again:
                    if self._exited.is_set():
                        # Why it died is said by whoever waits for its messages.
                        return
                    await asyncio.sleep(CROWDED_S)

    async def _receive(self) -> FromCore:
        return self._from_core.decode(await self._output.recv())

    async def _first_message(self) -> CoreReady:
        """The core's answer to its start, or its death, whichever comes first."""
        receiving = asyncio.ensure_future(self._receive())
        exiting = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({receiving, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # Its last words may still be in the pipe.
                await asyncio.wait({receiving}, timeout=0.2)
            if receiving.done():
                return _unwrap(receiving.result())
            raise EngineDeadError(f"while starting, the engine core {describe_exit(self._process.wait())}")
        finally:
            for future in (receiving, exiting):
                future.cancel()
            await asyncio.gather(receiving, exiting, return_exceptions=True)

    async def _read(self) -> None:
        """Deliver messages until the core is gone."""
        while self._mailbox.dead_reason is None:
            await self._room.acquire()
            message = await self._receive()
            assert isinstance(message, EngineCoreOutputs), message
            self._mailbox.deliver(message)

    async def _watch(self) -> None:
        """Notice the child's death within a turn of the event loop."""
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, self._exited.set)
        try:
            await self._exited.wait()
            self._process.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        # Whatever it sent last is read before its death is announced.
        for _ in range(20):
            if self._mailbox.dead_reason is not None:
                return
            await asyncio.sleep(0.01)
        if not self._stopping:
            self._mailbox.fail(f"the engine core {describe_exit(self._process.wait())}")


def _unwrap(message: FromCore) -> CoreReady:
    """The ready message, or the core's own start-up error."""
    if isinstance(message, CoreReady):
        return message
    assert isinstance(message, CoreFailed), message
    if message.kind == "config":
        raise ConfigError(message.message)
    if message.kind == "model_file":
        raise ModelFileError(message.message)
    raise EngineDeadError(f"the engine core could not start: {message.message}")
