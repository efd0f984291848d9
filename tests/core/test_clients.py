"""Every promise of `EngineCoreClient`, over a core on a thread and over one in a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import (
    ConfigError,
    EngineDeadError,
    ModelFileError,
    RequestFailedError,
)
from headrace.core.client import EngineCoreClient
from headrace.core.make_client import ClientKind, make_client
from headrace.core.process_client import ProcessClient
from headrace.messages.outputs import EngineCoreOutput, FinishReason
from headrace.messages.requests import (
    Drain,
    Query,
    Reload,
    ResetPrefixCache,
    Sleep,
    Wake,
)
from headrace.testing.engine_config import make_engine_config
from headrace.testing.requests import make_request
from headrace.testing.tokens import expected_output

EXECUTOR = "headrace.testing.simulated_executor:make_executor"
VOCAB, MAX_LEN = 1000, 128

MakeClient = Callable[..., Awaitable[EngineCoreClient]]


@pytest.fixture(params=["inproc", "process"])
def kind(request: pytest.FixtureRequest) -> ClientKind:
    return request.param


@pytest.fixture
async def make(kind: ClientKind) -> AsyncIterator[MakeClient]:
    """Makes started clients and shuts them down."""
    clients: list[EngineCoreClient] = []

    async def start(depth: int = 2, **options: Any) -> EngineCoreClient:
        config = make_engine_config(pipeline_depth=depth, max_model_len=MAX_LEN)
        client = make_client(config, kind, executor=EXECUTOR, options=options)
        clients.append(client)
        ready = await asyncio.wait_for(client.start(), 30)
        assert ready.max_model_len == MAX_LEN
        assert ready.vocab_size == VOCAB
        return client

    yield start
    for client in clients:
        await client.shutdown()


class Collector:
    """Reads a client's outputs by request."""

    def __init__(self, client: EngineCoreClient) -> None:
        self.client = client
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, EngineCoreOutput] = {}

    async def until(self, *request_ids: str, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.ends.keys() >= set(request_ids):
                await self.once()

    async def until_tokens(self, request_id: str, count: int, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.tokens[request_id]) < count:
                await self.once()

    async def once(self) -> None:
        for output in (await self.client.get_output()).outputs:
            assert output.request_id not in self.ends, "a request ends once"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output


async def test_requests_stream_the_tokens_that_are_theirs(make: MakeClient) -> None:
    client = await make()
    requests = [make_request(f"r{i}", prompt=3 + 7 * i, max_tokens=1 + 3 * i, seed=i) for i in range(9)]
    for request in requests:
        await client.add_request(request)
    collector = Collector(client)
    await collector.until(*(r.request_id for r in requests))
    for request in requests:
        expected = expected_output(request, vocab_size=VOCAB, max_model_len=MAX_LEN)
        assert collector.tokens[request.request_id] == expected.token_ids
        assert collector.ends[request.request_id].finish_reason is expected.finish_reason


async def test_aborts_unknown_double_and_before_scheduling(make: MakeClient) -> None:
    client = await make(step_s=0.005)
    collector = Collector(client)
    await client.abort(["never-heard-of"])
    await client.add_request(make_request("long", max_tokens=100))
    await collector.until_tokens("long", 2)
    await client.abort(["long", "never-heard-of"])
    await client.abort(["long"])
    await client.add_request(make_request("early", max_tokens=100))
    await client.abort(["early"])
    await client.add_request(make_request("after", max_tokens=3))
    await collector.until("after")
    assert len(collector.tokens["long"]) < 100
    assert collector.tokens["early"] == []
    assert (await client.control(Query(topic="state")))["num_unfinished"] == 0


async def test_a_verb_answers_its_caller_and_a_failing_one_nobody_else(
    make: MakeClient,
) -> None:
    client = await make()
    collector = Collector(client)
    state = await client.control(Query(topic="state"))
    assert state["state"] == "ready"
    with pytest.raises(RequestFailedError, match="nonsense"):
        await client.control(Query(topic="nonsense"))
    with pytest.raises(RequestFailedError, match="no model in /nowhere"):
        await client.control(Reload(path="/nowhere"))
    await client.add_request(make_request("r"))
    await collector.until("r")
    assert await client.control(ResetPrefixCache()) is True
    assert client.dead_reason is None


async def test_sleep_refuses_requests_until_wake(make: MakeClient) -> None:
    client = await make()
    collector = Collector(client)
    await client.control(Sleep())
    await client.add_request(make_request("asleep"))
    await collector.until("asleep")
    assert collector.ends["asleep"].finish_reason is FinishReason.ERROR
    assert "sleeping" in (collector.ends["asleep"].error or "")
    await client.control(Wake())
    await client.add_request(make_request("awake"))
    await collector.until("awake")
    assert collector.ends["awake"].finish_reason is FinishReason.LENGTH


async def test_drain_answers_when_the_last_request_has_ended(make: MakeClient) -> None:
    client = await make(step_s=0.002)
    collector = Collector(client)
    await client.add_request(make_request("r", max_tokens=20))
    drain = asyncio.create_task(client.control(Drain()))
    await collector.until_tokens("r", 1)
    assert not drain.done()
    await client.add_request(make_request("late"))
    await collector.until("r", "late")
    await asyncio.wait_for(drain, 5)
    assert len(collector.tokens["r"]) == 20
    assert "draining" in (collector.ends["late"].error or "")


async def test_a_dead_worker_ends_the_core_with_the_cause(make: MakeClient) -> None:
    client = await make(die_at=3)
    collector = Collector(client)
    await client.add_request(make_request("r", max_tokens=50))
    with pytest.raises(EngineDeadError, match="a simulated worker died"):
        await collector.until("r", timeout_s=5)
    assert "a simulated worker died" in (client.dead_reason or "")
    with pytest.raises(EngineDeadError, match="a simulated worker died"):
        await client.add_request(make_request("next"))
    with pytest.raises(EngineDeadError, match="a simulated worker died"):
        await client.control(Query(topic="state"))
    await client.abort(["r"])


@pytest.mark.parametrize(
    ("start_error", "error"),
    [("config", ConfigError), ("model_file", ModelFileError), ("crash", Exception)],
)
async def test_a_start_up_error_keeps_its_kind_and_message(
    kind: ClientKind, start_error: str, error: type[Exception]
) -> None:
    client = make_client(
        make_engine_config(),
        kind,
        executor=EXECUTOR,
        options={"start_error": start_error},
    )
    with pytest.raises(error, match="start-up was told to fail"):
        await client.start()
    await client.shutdown()


async def test_progress_moves_with_work(make: MakeClient) -> None:
    client = await make()
    before = client.progress()
    await client.add_request(make_request("r", max_tokens=8))
    await Collector(client).until("r")
    assert client.progress() >= before + 8


async def test_shutdown_ends_waiting_calls_and_is_idempotent(make: MakeClient) -> None:
    client = await make(step_s=0.01)
    await client.add_request(make_request("r", max_tokens=100))
    await client.shutdown()
    with pytest.raises(EngineDeadError):
        await Collector(client).until("r", "more")
    await client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await client.add_request(make_request("later"))


async def test_shutdown_with_drain_finishes_what_runs(make: MakeClient) -> None:
    client = await make(step_s=0.001)
    collector = Collector(client)
    await client.add_request(make_request("r", max_tokens=30))
    reading = asyncio.create_task(collector.until("r"))
    await client.shutdown(drain_s=10)
    await reading
    assert len(collector.tokens["r"]) == 30


def _processes_of_session(session: int) -> list[int]:
    """Processes that belong to a session and are not zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


async def _started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ProcessClient:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = ProcessClient(make_engine_config(), EXECUTOR, options)
    await client.start()
    return client


async def test_a_killed_core_ends_everything_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await _started(tmp_path, monkeypatch, step_s=0.01)
    await client.add_request(make_request("r", max_tokens=100))
    collector = Collector(client)
    await collector.until_tokens("r", 1)
    call = asyncio.create_task(client.control(Drain()))
    await asyncio.sleep(0)
    began = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await collector.until("r")
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await call
    assert time.monotonic() - began < 2
    await client.shutdown()


async def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await _started(tmp_path, monkeypatch)
    assert list(tmp_path.iterdir()) == [], "the folder goes as soon as both sides are connected"
    assert os.getsid(client.pid) == client.pid
    assert os.getsid(client.pid) != os.getsid(0)
    pid = client.pid
    await client.shutdown()
    assert _processes_of_session(pid) == []


async def test_the_start_up_timeline_covers_the_time_to_ready() -> None:
    began = time.monotonic()
    client = ProcessClient(make_engine_config(), EXECUTOR, {"start_s": 0.3})
    ready = await client.start()
    took_ms = (time.monotonic() - began) * 1e3
    assert ready.phases_ms.keys() >= {"process", "imports", "workers", "kv_cache", "other"}
    assert 0.9 * took_ms - 100 < sum(ready.phases_ms.values()) < took_ms
    await client.shutdown()


async def test_a_core_that_ignores_signals_and_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.process_client.STOP_GRACE_S", 0.3)
    client = await _started(tmp_path, monkeypatch)
    os.kill(client.pid, signal.SIGTERM)
    os.kill(client.pid, signal.SIGSTOP)
    began = time.monotonic()
    await client.shutdown()
    assert time.monotonic() - began < 3
    assert _processes_of_session(client.pid) == []


async def test_a_start_that_takes_too_long_is_given_up() -> None:
    client = ProcessClient(make_engine_config(), EXECUTOR, {"start_s": 60.0}, start_timeout_s=0.5)
    with pytest.raises(EngineDeadError, match=r"not ready after"):
        await client.start()
    assert _processes_of_session(client.pid) == []


async def test_a_core_whose_parent_dies_exits() -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        from headrace.core.process_client import ProcessClient
        from headrace.testing.engine_config import make_engine_config

        async def main():
            client = ProcessClient(make_engine_config(), {EXECUTOR!r})
            await client.start()
            print(client.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    core = int(await parent.stdout.readline())
    assert _processes_of_session(core)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(5):
        while _processes_of_session(core):
            await asyncio.sleep(0.02)


def test_a_client_that_is_forgotten_leaves_nothing_behind(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path)!r}
        from headrace.core.process_client import ProcessClient
        from headrace.testing.engine_config import make_engine_config
        print(ProcessClient(make_engine_config(), {EXECUTOR!r}).pid)
        """
    )
    # The end of its output is that of all who held it, the core among them; but a process closes what it holds a moment
    # before it is gone.
    finished = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, timeout=60)
    deadline = time.monotonic() + 10
    while _processes_of_session(int(finished.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_the_client_side_imports_no_torch() -> None:
    modules = (
        "headrace.core.client",
        "headrace.core.make_client",
        "headrace.core.process_client",
    )
    program = f"import sys; [__import__(m) for m in {modules}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
