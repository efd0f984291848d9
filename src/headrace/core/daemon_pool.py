"""A few daemon threads for work that may be slow or stuck.

Unlike the standard pool, nobody waits for these threads when the process ends, and the queue is bounded. Threads start
when there is work for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, Full, Queue
from typing import Any, TypeVar

T = TypeVar("T")

IDLE_S = 30.0


class PoolFullError(Exception):
    """Too much work waits already."""


class DaemonPool:
    """See the module.

    Args:
        name: of the threads.
        num_threads: most that run at once; they end after a while without work.
        limit: most calls that may wait.
    """

    def __init__(self, name: str, num_threads: int = 2, limit: int = 1024) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: Queue[tuple[Future[Any], Callable[[], Any]]] = Queue(limit)
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_idle = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` run on a thread; raises `PoolFullError` when too much waits."""
        future: Future[T] = Future()
        with self._lock:
            try:
                self._queue.put_nowait((future, work))
            except Full:
                raise PoolFullError(f"{self._name}: too much waits already") from None
            if self._queue.qsize() > self._num_idle and self._num_alive < self._num_threads:
                self._num_alive += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            try:
                future, work = self._queue.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    self._num_idle -= 1
                    if not self._queue.empty():
                        continue
                    self._num_alive -= 1
                return
            with self._lock:
                self._num_idle -= 1
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to the one who waits
                future.set_exception(error)
