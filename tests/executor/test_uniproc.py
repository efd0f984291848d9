"""The one-thread executor: order, exceptions, shutdown; a fake worker stands in for the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EngineDeadError
from headrace.executor import uniproc
from headrace.executor.base import ExecutorReady
from headrace.executor.uniproc import UniprocExecutor
from headrace.messages.requests import Sleep


class FakeWorker:
    """Notes calls; a step that is an exception is raised, one that is an event is waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.waiting = threading.Event()

    def _note(self, name: str, value: Any) -> Any:
        self.calls.append((name, value))
        self.threads.add(threading.current_thread().name)
        if isinstance(value, threading.Event):
            self.waiting.set()
            value.wait(10)
        if isinstance(value, BaseException):
            raise value
        return value

    def load(self) -> ExecutorReady:
        self._note("load", None)
        return ExecutorReady(layer_specs=[], available_bytes=1, vocab_size=2)

    def initialize_kv_cache(self, plan: Any) -> None:
        self._note("kv", plan)

    def execute(self, step: Any) -> Any:
        return self._note("execute", step)

    def sample(self, grammar: Any) -> Any:
        return self._note("sample", grammar)

    def control(self, request: Any) -> Any:
        return self._note("control", request)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def executor(worker: FakeWorker) -> Iterator[UniprocExecutor]:
    made = UniprocExecutor(lambda: worker)  # type: ignore[arg-type,return-value]
    yield made
    made.shutdown()


def execute(executor: UniprocExecutor, value: Any) -> Future[Any]:
    return executor.execute_model(value)


def test_calls_run_in_order_on_one_thread(executor: UniprocExecutor, worker: FakeWorker) -> None:
    assert executor.start().vocab_size == 2
    executor.initialize_kv_cache("plan")  # type: ignore[arg-type]
    gate = threading.Event()
    blocked = execute(executor, gate)
    others = [execute(executor, 1), executor.sample_tokens("mask"), execute(executor, 2)]  # type: ignore[arg-type]
    assert not blocked.done() and not any(f.done() for f in others)
    gate.set()
    assert [f.result(5) for f in others] == [1, "mask", 2]
    sleep = Sleep()
    assert executor.control(sleep) is sleep
    assert [name for name, _ in worker.calls] == ["load", "kv", "execute", "execute", "sample", "execute", "control"]
    assert len(worker.threads) == 1 and threading.current_thread().name not in worker.threads
    assert executor.execute_model(3, non_block=False).done()  # type: ignore[arg-type]


def test_exceptions_travel_and_the_worker_stays(executor: UniprocExecutor) -> None:
    executor.start()
    with pytest.raises(ValueError, match="bad step"):
        execute(executor, ValueError("bad step")).result(5)
    assert execute(executor, 7).result(5) == 7
    executor.check_health()


def test_a_start_that_fails_raises_its_own_error() -> None:
    def fail() -> Any:
        raise ConfigError("no such backend")

    executor = UniprocExecutor(fail)
    with pytest.raises(ConfigError, match="no such backend"):
        executor.start()
    executor.shutdown()


def test_shutdown_ends_queued_calls_and_is_idempotent(executor: UniprocExecutor, worker: FakeWorker) -> None:
    executor.start()
    gate = threading.Event()
    running, queued = execute(executor, gate), execute(executor, 1)
    assert worker.waiting.wait(5)
    closer = threading.Thread(target=executor.shutdown)
    closer.start()
    with pytest.raises(EngineDeadError):
        queued.result(5)
    gate.set()
    closer.join(5)
    assert running.result(5) is gate
    executor.shutdown()
    with pytest.raises(EngineDeadError):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        execute(executor, 2)


def test_shutdown_leaves_a_hung_call_behind(
    executor: UniprocExecutor, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniproc, "SHUTDOWN_S", 0.05)
    executor.start()
    gate = threading.Event()
    execute(executor, gate)
    assert worker.waiting.wait(5)
    executor.shutdown()
    gate.set()


def test_shutdown_before_start(executor: UniprocExecutor) -> None:
    executor.shutdown()
