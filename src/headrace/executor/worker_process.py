"""A worker in a process of its own, one rank of a group.

Run as ``python -m headrace.executor.worker_process FD``; calls come through that socket. The main thread owns the
worker and serves calls in order. A second thread only reads, so that the process ends at once when its parent is
gone, even in the middle of a collective that can never finish.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from queue import Queue

import msgspec
import torch.distributed as dist

from headrace.base.clock import SystemClock
from headrace.base.errors import ConfigError, EngineDeadError, ModelFileError, RequestFailedError
from headrace.base.logging import get_logger, setup_logging
from headrace.base.progress import ProgressWord
from headrace.device.distributed.groups import Group, ParallelGroups
from headrace.executor.wire import (
    Call,
    Control,
    Done,
    ErrorKind,
    Execute,
    Failed,
    Initialized,
    InitializeKV,
    Ready,
    Reply,
    Sample,
    Start,
    call_codec,
    receive_frame,
    reply_codec,
    send_frame,
)
from headrace.executor.worker import Worker, worker_thread

logger = get_logger(__name__)

MAX_QUEUED_CALLS = 64
COLLECTIVE_TIMEOUT_S = 60.0


class WorkerServer:
    """Carries out calls on one worker."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._rank = 0

    def serve(self, call: Call) -> Reply:
        """The reply to a call; an exception becomes `Failed`."""
        try:
            return self._answer(call)
        except Exception as error:
            logger.debug("a call failed", exc_info=True)
            return Failed(_kind_of(error), str(error) or type(error).__name__)

    def _answer(self, call: Call) -> Reply:
        if isinstance(call, Start):
            return self._start(call)
        worker = self._worker
        assert worker is not None, "start comes first"
        match call:
            case InitializeKV(plan=plan):
                return Initialized(worker.initialize_kv_cache(plan))
            case Execute(step=step):
                output = worker.execute(step)
            case Sample(grammar=grammar):
                output = worker.sample(grammar)
            case Control(request=request):
                return Done(value=worker.control(request))
        return Done(output if self._rank == 0 else None)

    def _start(self, call: Start) -> Reply:
        observability = call.config.observability
        setup_logging(observability.log_level, observability.log_format, f"worker {call.rank}")
        self._rank = call.rank
        # Ranks of one machine talk through the loopback device, whatever the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call.rendezvous}",
            rank=call.rank,
            world_size=call.size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        parallel = ParallelGroups(tp=Group(call.rank, call.size, dist.group.WORLD))
        progress = ProgressWord(name=call.progress_name) if call.progress_name else ProgressWord()
        self._worker = Worker(call.config, progress, SystemClock(), parallel)
        return Ready(self._worker.load())


def _kind_of(error: Exception) -> ErrorKind:
    if isinstance(error, ModelFileError):
        return "model_file"
    if isinstance(error, ConfigError):
        return "config"
    if isinstance(error, EngineDeadError):
        return "dead"
    return "request" if isinstance(error, RequestFailedError) else "step"


def _read_calls(connection: socket.socket, calls: Queue[Call]) -> None:
    codec = call_codec()
    while True:
        try:
            calls.put(codec.decode(receive_frame(connection)))
        except (EOFError, OSError):
            # The executor closes the connection to end its workers; nothing here needs saving.
            os._exit(0)
        except msgspec.DecodeError:
            logger.exception("a call could not be read")
            os._exit(1)


def main(fd: int) -> None:
    """Serve until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    calls: Queue[Call] = Queue(MAX_QUEUED_CALLS)
    threading.Thread(target=_read_calls, args=(connection, calls), name="calls", daemon=True).start()
    with worker_thread():
        _serve_calls(connection, calls)


def _serve_calls(connection: socket.socket, calls: Queue[Call]) -> None:
    server, codec = WorkerServer(), reply_codec()
    while True:
        send_frame(connection, codec.encode(server.serve(calls.get())))


if __name__ == "__main__":
    main(int(sys.argv[1]))
