"""The core process: an engine core behind two sockets.

Run as ``python -m headrace.core.process FOLDER PARENT_PID PRELOAD`` by `core.spawn`; it imports the module PRELOAD
while the server finds out what is to be served. Everything else arrives as the first message. The main thread runs the
loop, an input thread decodes (aborts take the fast lane), an output thread encodes.

- It leads its own session, so Ctrl-C reaches only the server; it ignores SIGTERM too: the server decides when it ends.
- It dies with the thread that started it (the kernel sends SIGKILL), so no core outlives its server.
- A crash is told to the client with its root cause before the process exits with code 1.
- The garbage collector rests until start-up is over and never looks at its objects, so that collections stay short.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from queue import Full, Queue

import msgspec
import zmq

from headrace.base.clock import SystemClock
from headrace.base.errors import EngineDeadError
from headrace.base.last_words import describe_cause
from headrace.base.logging import get_logger, setup_logging
from headrace.base.postponed_imports import postpone
from headrace.base.progress import ProgressWord
from headrace.core.build import as_failure, build_core, load_factory
from headrace.core.engine_core import EngineCore
from headrace.core.loop import CoreLoop, Inbox
from headrace.core.transport import (
    HIGH_WATER,
    LAST_WORDS_MS,
    CoreStart,
    from_core_codec,
    input_address,
    output_address,
    to_core_codec,
)
from headrace.messages.outputs import EngineCoreOutputs, FromCore

logger = get_logger(__name__)

RECONNECT_MS = 5
SEND_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0
OUTBOX_LIMIT = 1024
_PR_SET_PDEATHSIG = 1
# What PyTorch's operators would return for tensors without data: a third of a second to import, and nobody here asks.
_SELDOM_USED = ("torch._meta_registrations",)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


class _Sockets:
    """Both sockets; the input one belongs to one thread at a time, the output one to another."""

    def __init__(self, folder: str) -> None:
        self.context = zmq.Context()
        self.input = self._connect(zmq.PULL, input_address(folder))
        self.output = self._connect(zmq.PUSH, output_address(folder))
        self._to_core = to_core_codec()
        self._from_core = from_core_codec()
        self._reading = False

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(HIGH_WATER)
        socket.linger = 0
        # The client may bind its sockets later than this.
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(address)
        return socket

    def receive_start(self) -> CoreStart:
        """The first message; the parent's death ends the wait, and with it this process."""
        start = self._to_core.decode(self.input.recv())
        assert isinstance(start, CoreStart), start
        return start

    def send(self, message: FromCore) -> None:
        """Send from the thread that owns the output socket."""
        self.output.send(self._from_core.encode(message))

    def read_into(self, inbox: Inbox) -> None:
        """Decode messages on a thread of its own until the context closes."""
        self._reading = True
        threading.Thread(target=self._read, args=(inbox,), name="core-input", daemon=True).start()

    def _read(self, inbox: Inbox) -> None:
        while True:
            try:
                message = self._to_core.decode(self.input.recv())
            except zmq.ContextTerminated:
                self.input.close()
                return
            except msgspec.DecodeError as error:
                inbox.fail(f"a message to the core could not be read: {error}")
                return
            assert not isinstance(message, CoreStart)
            inbox.put(0, message)

    def close(self, last_words: FromCore | None = None) -> None:
        """Say ``last_words`` and close, within about two seconds even when nobody listens."""
        if last_words is not None:
            self.output.linger = LAST_WORDS_MS
            self.output.send(self._from_core.encode(last_words))
        self.output.close()
        if not self._reading:
            self.input.close()
        closer = threading.Thread(target=self.context.term, daemon=True)
        closer.start()
        closer.join(2 * LAST_WORDS_MS / 1000)


class _Outbox:
    """Encodes and sends on a thread of its own, so that the loop does not wait for the wire."""

    def __init__(self, sockets: _Sockets) -> None:
        self._sockets = sockets
        self._queue: Queue[EngineCoreOutputs | None] = Queue(OUTBOX_LIMIT)
        self._thread = threading.Thread(target=self._run, name="core-output", daemon=True)
        self._thread.start()

    def put(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Queue a message; blocks while the client reads too slowly."""
        assert client_index == 0, client_index
        try:
            self._queue.put(outputs, timeout=SEND_TIMEOUT_S)
        except Full:
            raise EngineDeadError(f"the server has read nothing for {SEND_TIMEOUT_S:.0f} s") from None

    def close(self) -> bool:
        """Send what is queued and hand the socket back; ``False`` when the client does not read."""
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except Full:
            return False
        self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (outputs := self._queue.get()) is not None:
            self._sockets.send(outputs)


def serve(
    core: EngineCore, sockets: _Sockets, progress: ProgressWord, phases_ms: dict[str, float]
) -> EngineCoreOutputs | None:
    """Say that the core is ready and run it until it ends; returns its last words, should it have any to say."""
    sockets.send(msgspec.structs.replace(core.ready, phases_ms=phases_ms))
    inbox, outbox = Inbox(core), _Outbox(sockets)
    sockets.read_into(inbox)
    gc.collect()
    gc.freeze()
    gc.enable()
    last_words = None
    try:
        CoreLoop(core, inbox, outbox.put, progress).run()
    except Exception as error:
        logger.exception("the engine core failed")
        last_words = EngineCoreOutputs(dead=describe_cause(error))
    core.shutdown()
    if not outbox.close():
        # The socket still belongs to the output thread and nobody reads: there is no one to tell.
        os._exit(1)
    return last_words


def main(folder: str, parent_pid: int, preload: str) -> int:
    """Run a core process; returns its exit code."""
    die_with_parent(parent_pid)
    gc.disable()
    postpone(_SELDOM_USED)
    now = SystemClock().monotonic
    began = now()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if preload:
        # What is wrong with it is told once there is somebody to tell.
        with suppress(Exception):
            import_module(preload)
    preloaded = now()
    sockets = _Sockets(folder)
    start = sockets.receive_start()
    received = now()
    observability = start.config.observability
    setup_logging(observability.log_level, observability.log_format, "core")
    progress = ProgressWord(name=start.progress_name)
    try:
        load_factory(start.executor)
        imported = now()
        core = build_core(start.config, start.executor, start.options, progress, prepares_grammars=True)
    except Exception as error:
        logger.debug("the engine core cannot start", exc_info=True)
        sockets.close(as_failure(error))
        return 1
    phases_ms = {
        "process": (began - start.spawned_at) * 1e3,
        "imports": (preloaded - began + imported - received) * 1e3,
        "configuration": (received - preloaded) * 1e3,
    }
    phases_ms |= core.ready.phases_ms
    phases_ms["other"] = (now() - start.spawned_at) * 1e3 - sum(phases_ms.values())
    last_words = serve(core, sockets, progress, phases_ms)
    sockets.close(last_words)
    return 0 if last_words is None else 1


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of executors and sockets are no reason to stay.
    os._exit(code)
