"""One worker on a thread of this process.

The thread owns the worker: everything that touches the device runs there, in the order of the calls. Exceptions
travel in futures and leave the thread alive. PyTorch and native kernels release the GIL while they compute, so the
caller goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import EngineDeadError
from headrace.base.logging import get_logger
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.executor.base import Executor, ExecutorReady
from headrace.executor.worker import Worker, worker_thread
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

logger = get_logger(__name__)
T = TypeVar("T")

MAX_QUEUED_CALLS = 64
SHUTDOWN_S = 5.0
HEALTH_INTERVAL_S = 1.0

_Call = tuple[Callable[[], Any], "Future[Any]"]


class UniprocExecutor(Executor):
    """See the module.

    Args:
        make_worker: called on the worker thread by `start`.
    """

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="worker", daemon=True)

    def start(self) -> ExecutorReady:
        self._thread.start()
        return self._wait(self._submit(self._load))

    def initialize_kv_cache(self, config: KVCacheConfig) -> GraphSummary:
        return self._wait(self._submit(lambda: self._loaded().initialize_kv_cache(config)))

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        future = self._submit(lambda: self._loaded().execute(step))
        return future if non_block else self._settled(future)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return self._submit(lambda: self._loaded().sample(grammar))

    def control(self, request: AnyControl) -> Any:
        return self._wait(self._submit(lambda: self._loaded().control(request)))

    def check_health(self) -> None:
        if self._closed.is_set() or not self._thread.is_alive():
            raise EngineDeadError("the executor is shut down")

    def shutdown(self) -> None:
        """Drop what is queued, let the call in progress end, release the worker. A hung call is left behind."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._drop_queued()
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join(SHUTDOWN_S)
            if self._thread.is_alive():
                logger.warning("the worker did not stop within %.0f s and is left behind", SHUTDOWN_S)

    def _load(self) -> ExecutorReady:
        self._worker = self._make_worker()
        return self._worker.load()

    def _loaded(self) -> Worker:
        assert self._worker is not None, "start comes first"
        return self._worker

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self.check_health()
        if self._calls.qsize() >= MAX_QUEUED_CALLS:
            raise EngineDeadError("the worker takes no calls; it hangs")
        self._calls.put((call, future))
        return future

    def _wait(self, future: Future[T]) -> T:
        """The future's result, as long as the worker lives."""
        self._settled(future)
        return future.result(0)

    def _settled(self, future: Future[T]) -> Future[T]:
        while True:
            try:
                future.exception(HEALTH_INTERVAL_S)
                return future
            except FutureTimeoutError:
                self.check_health()

    def _serve(self) -> None:
        """The worker thread."""
        with worker_thread():
            self._serve_calls()
            self._worker = None
        self._drop_queued()

    def _serve_calls(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 (a border: whatever it is travels in the future)
                future.set_exception(error)
            # A finished call must not keep its step or its error's frames alive until the next one comes.
            del item, call, future

    def _drop_queued(self) -> None:
        while True:
            try:
                item = self._calls.get_nowait()
            except Empty:
                return
            if item is not None:
                item[1].set_exception(EngineDeadError("the executor is shut down"))


def make_executor(config: EngineConfig, progress: ProgressWord, *, clock: Clock | None = None) -> UniprocExecutor:
    """The executor of a configuration with one worker."""
    used = clock or SystemClock()
    return UniprocExecutor(lambda: Worker(config, progress, used))
