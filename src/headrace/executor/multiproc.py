"""Several workers on one machine, each in a process of its own, sharing every layer (tensor parallel).

All ranks get every call in the same order and do the same work on their share; they sample the same tokens from the
same logits, so only rank 0's answer is used. A call has its result when every rank has answered. An error that all
ranks report is a fault of the step and travels in its future. Anything else (one rank fails and another does not, a
process ends, a rank does not take its calls) leaves the ranks out of step and is the end of the executor, with the
cause.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, EngineDeadError, HeadraceError, ModelFileError, RequestFailedError
from headrace.base.last_words import describe_exit
from headrace.base.logging import get_logger
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.executor.base import Executor, ExecutorReady
from headrace.executor.wire import (
    Call,
    Control,
    Done,
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
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

logger = get_logger(__name__)

SEND_TIMEOUT_S = 30
STOP_GRACE_S = 2.0
HEALTH_INTERVAL_S = 1.0
_ERRORS: dict[str, type[HeadraceError]] = {
    "config": ConfigError,
    "model_file": ModelFileError,
    "request": RequestFailedError,
}


@dataclass(slots=True)
class _Pending:
    """One call and the replies of the ranks so far."""

    future: Future[Reply]
    replies: dict[int, Reply] = field(default_factory=dict)


@dataclass(slots=True)
class _Rank:
    """One worker process and the parent's end of its connection."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    waiting: deque[_Pending] = field(default_factory=deque)


class MultiprocExecutor(Executor):
    """See the module.

    Args:
        config: ``parallel.tensor_parallel_size`` is the number of workers; its threads are shared out among them.
        progress: rank 0 moves it when it is shared memory; otherwise it moves with every reply.
    """

    def __init__(self, config: EngineConfig, progress: ProgressWord) -> None:
        parallel = config.parallel
        if parallel.pipeline_parallel_size > 1:
            raise ConfigError("--pipeline-parallel-size: the multiproc executor serves one stage only")
        self._size = parallel.tensor_parallel_size
        threads = max(1, parallel.num_threads // self._size)
        self._config = replace(config, parallel=replace(parallel, num_threads=threads))
        self._progress = progress
        self._lock = threading.Lock()
        self._dead_reason: str | None = None
        self._folder = tempfile.mkdtemp(prefix="headrace-")
        self._calls, self._replies = call_codec(), reply_codec()
        self._ranks: list[_Rank] = []
        self._readers: list[threading.Thread] = []

    def start(self) -> ExecutorReady:
        for rank in range(self._size):
            self._ranks.append(_spawn(rank))
        for member in self._ranks:
            reader = threading.Thread(target=self._read, args=(member,), name=f"worker-{member.rank}", daemon=True)
            self._readers.append(reader)
            reader.start()
        rendezvous = os.path.join(self._folder, "ranks")
        starts = [
            Start(self._config, rank, self._size, rendezvous, self._progress.name if rank == 0 else None)
            for rank in range(self._size)
        ]
        reply = self._wait(self._send([self._calls.encode(start) for start in starts]))
        assert isinstance(reply, Ready)
        return replace(reply.ready, available_bytes=reply.ready.available_bytes // self._size)

    def initialize_kv_cache(self, config: KVCacheConfig) -> GraphSummary:
        reply = self._wait(self._call_all(InitializeKV(config)))
        assert isinstance(reply, Initialized)
        return reply.graphs

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        replies = self._call_all(Execute(step))
        if not non_block:
            self._settled(replies)
        return _output_of(replies)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return _output_of(self._call_all(Sample(grammar)))

    def control(self, request: AnyControl) -> Any:
        reply = self._wait(self._call_all(Control(request)))
        assert isinstance(reply, Done)
        return reply.value

    def check_health(self) -> None:
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)

    def shutdown(self) -> None:
        """Close the connections, which ends the workers; kill those that stay."""
        self._die("the executor is shut down")
        for member in self._ranks:
            try:
                member.process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(STOP_GRACE_S)
        for member in self._ranks:
            member.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _call_all(self, call: Call) -> Future[Reply]:
        """Send the same call to every rank."""
        return self._send([self._calls.encode(call)] * self._size)

    def _send(self, frames: list[bytes]) -> Future[Reply]:
        """Send one encoded call to each rank; the future has rank 0's reply once every rank has answered."""
        self.check_health()
        pending = _Pending(Future())
        with self._lock:
            for member in self._ranks:
                member.waiting.append(pending)
        for member, frame in zip(self._ranks, frames, strict=True):
            try:
                send_frame(member.connection, frame)
            except OSError as error:
                self._die(self._why_gone(member) or f"worker {member.rank} takes no calls: {error}")
                self.check_health()
        return pending.future

    def _read(self, member: _Rank) -> None:
        """Hand the replies of one rank to their calls, in order, until it is gone."""
        while True:
            try:
                reply = self._replies.decode(receive_frame(member.connection))
            except (EOFError, OSError):
                self._die(self._why_gone(member) or f"worker {member.rank} closed its connection")
                return
            except msgspec.DecodeError as error:
                self._die(f"a reply of worker {member.rank} could not be read: {error}")
                return
            if member.rank == 0 and self._progress.name is None:
                self._progress.advance()
            with self._lock:
                if not member.waiting:
                    return
                pending = member.waiting.popleft()
                pending.replies[member.rank] = reply
                complete = len(pending.replies) == self._size
            if complete:
                self._resolve(pending)

    def _resolve(self, pending: _Pending) -> None:
        failed = {rank: reply for rank, reply in pending.replies.items() if isinstance(reply, Failed)}
        if not failed:
            pending.future.set_result(pending.replies[0])
            return
        rank = min(failed)
        error = failed[rank]
        if error.kind == "dead":
            self._die(error.message)
            pending.future.set_exception(EngineDeadError(str(self._dead_reason)))
        elif len(failed) < self._size and error.kind not in ("config", "model_file"):
            self._die(f"worker {rank} failed alone: {error.message}")
            pending.future.set_exception(EngineDeadError(str(self._dead_reason)))
        else:
            pending.future.set_exception(_ERRORS.get(error.kind, RuntimeError)(error.message))

    def _why_gone(self, member: _Rank) -> str | None:
        """How a worker process ended, in words; ``None`` while it lives."""
        try:
            code = member.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            return None
        return f"worker {member.rank} {describe_exit(code)}"

    def _die(self, reason: str) -> None:
        """Fail everything that waits, once, and let all workers go."""
        with self._lock:
            if self._dead_reason is not None:
                return
            self._dead_reason = reason
            pending = {id(p): p for member in self._ranks for p in member.waiting}
            for member in self._ranks:
                member.waiting.clear()
        for item in pending.values():
            item.future.set_exception(EngineDeadError(reason))
        for member in self._ranks:
            try:
                member.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _wait(self, future: Future[Reply]) -> Reply:
        self._settled(future)
        return future.result(0)

    def _settled(self, future: Future[Reply]) -> None:
        while True:
            try:
                future.exception(HEALTH_INTERVAL_S)
                return
            except FutureTimeoutError:
                self.check_health()


def _spawn(rank: int) -> _Rank:
    """Start a worker process; it inherits one end of a socket pair."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.executor.worker_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    return _Rank(rank, process, ours)


def _output_of(replies: Future[Reply]) -> Future[Any]:
    """The output that a reply carries."""
    result: Future[Any] = Future()

    def relay(done: Future[Reply]) -> None:
        error = done.exception()
        if error is not None:
            result.set_exception(error)
            return
        reply = done.result()
        assert isinstance(reply, Done)
        result.set_result(reply.output)

    replies.add_done_callback(relay)
    return result


def make_executor(config: EngineConfig, progress: ProgressWord) -> MultiprocExecutor:
    """The executor of a configuration with several workers."""
    return MultiprocExecutor(config, progress)
