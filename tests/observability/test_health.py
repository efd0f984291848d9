"""The fault matrix of ``/health``: red within ten seconds for what cannot go on, green for what only takes long."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.base.errors import EngineDeadError, NotAcceptingError
from headrace.core.process_client import ProcessClient
from headrace.frontend.async_llm import AsyncLLM
from headrace.messages.sampling_params import SamplingParams
from headrace.testing.engine_config import make_engine_config
from tests.device.families import make_hf_model, save_hf_model
from tests.executor.test_multiproc import two_ranks
from tests.http.server_process import ServerProcess
from tests.observability.live_service import EXECUTOR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
RED_WITHIN_S = 10.0

Start = Callable[..., Awaitable[AsyncLLM]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines with a core process of their own."""
    started: list[AsyncLLM] = []

    async def begin(**options: Any) -> AsyncLLM:
        config = make_engine_config(max_num_seqs=2)
        llm = AsyncLLM(ProcessClient(config, EXECUTOR, options), config, None)
        started.append(llm)
        await llm.start()
        return llm

    yield begin
    for llm in started:
        await llm.shutdown()


async def ask(llm: AsyncLLM, num_tokens: int = 100) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": [11, 12, 13]}, params):
        pass


async def seconds_until_red(llm: AsyncLLM) -> tuple[float, str]:
    """How long health stays green, and what it says then."""
    began = time.monotonic()
    while time.monotonic() - began < RED_WITHIN_S:
        try:
            llm.check_health()
        except EngineDeadError as error:
            return time.monotonic() - began, str(error)
        await asyncio.sleep(0.05)
    return RED_WITHIN_S, ""


async def stays_green(llm: AsyncLLM, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        llm.check_health()
        await asyncio.sleep(0.05)


async def test_a_stopped_core_is_red_and_recovers(start: Start) -> None:
    llm = await start(step_s=0.02)
    asking = asyncio.create_task(ask(llm))
    await asyncio.sleep(0.2)
    assert isinstance(llm.client, ProcessClient)
    os.kill(llm.client.pid, signal.SIGSTOP)
    red, why = await seconds_until_red(llm)
    os.kill(llm.client.pid, signal.SIGCONT)
    assert red < RED_WITHIN_S and "has not moved" in why
    await asking
    llm.check_health()


async def test_the_first_request_to_a_core_that_was_stopped_while_idle_is_answered(start: Start) -> None:
    llm = await start(step_s=0.02)
    assert isinstance(llm.client, ProcessClient)
    os.kill(llm.client.pid, signal.SIGSTOP)
    await stays_green(llm, 0.5)
    began = time.monotonic()
    asking = asyncio.create_task(ask(llm))
    await asyncio.sleep(0)
    red, _ = await seconds_until_red(llm)
    assert red < RED_WITHIN_S
    with pytest.raises(NotAcceptingError, match="has not moved"):
        await asking
    assert time.monotonic() - began < RED_WITHIN_S + 2
    os.kill(llm.client.pid, signal.SIGCONT)
    await ask(llm, 5)
    llm.check_health()


async def test_a_deadlock_is_red(start: Start) -> None:
    llm = await start(step_s=0.01, hang_at=3)
    asking = asyncio.create_task(ask(llm))
    red, why = await seconds_until_red(llm)
    assert red < RED_WITHIN_S and "has not moved" in why
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_dead_workers_are_red_at_once(start: Start) -> None:
    llm = await start(step_s=0.01, die_at=3)
    with pytest.raises(EngineDeadError):
        await ask(llm)
    red, why = await seconds_until_red(llm)
    assert red < 2 and why


async def test_a_killed_core_is_red_at_once(start: Start) -> None:
    llm = await start(step_s=0.01)
    asking = asyncio.create_task(ask(llm))
    await asyncio.sleep(0.1)
    assert isinstance(llm.client, ProcessClient)
    os.kill(llm.client.pid, signal.SIGKILL)
    red, why = await seconds_until_red(llm)
    assert red < 2 and "SIGKILL" in why
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await asking


async def test_a_long_legal_step_is_green(start: Start) -> None:
    llm = await start(step_s=6.5)
    asking = asyncio.create_task(ask(llm, 1))
    await stays_green(llm, 6.0)
    await asking
    llm.check_health()


async def test_idleness_and_saturation_are_green(start: Start) -> None:
    llm = await start(step_s=0.005)
    # Idle for longer than what counts as hung, were there work.
    llm._watch.observe(llm.client.progress(), False, time.monotonic() - 100)
    llm.check_health()
    crowd = [asyncio.create_task(ask(llm, 30)) for _ in range(40)]
    await stays_green(llm, 1.5)
    await asyncio.gather(*crowd)


# Real workers: two ranks of a tiny model, each in a process of its own.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_model(make_hf_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def two_workers(tiny: Path) -> AsyncIterator[AsyncLLM]:
    config = two_ranks(tiny)
    llm = AsyncLLM(ProcessClient(config, "headrace.executor.multiproc:make_executor"), config, None)
    await llm.start()
    yield llm
    await llm.shutdown()


def worker_pids(llm: AsyncLLM) -> list[int]:
    assert isinstance(llm.client, ProcessClient)
    # A worker is the child of whichever thread of the core started it.
    tasks = Path(f"/proc/{llm.client.pid}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    found = [
        pid for pid in children if b"headrace.executor.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(found) == 2
    return sorted(found)


async def keep_busy(llm: AsyncLLM) -> asyncio.Task[None]:
    """Requests one after the other, and the first of them under way."""

    async def work() -> None:
        while True:
            await ask(llm, 60)

    task = asyncio.create_task(work())
    before = llm.client.progress()
    while llm.client.progress() == before:
        await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_hanging_worker_is_red_and_recovers(two_workers: AsyncLLM, rank: int) -> None:
    pid = worker_pids(two_workers)[rank]
    busy = await keep_busy(two_workers)
    os.kill(pid, signal.SIGSTOP)
    red, why = await seconds_until_red(two_workers)
    os.kill(pid, signal.SIGCONT)
    assert red < RED_WITHIN_S and "has not moved" in why
    async with asyncio.timeout(20):
        while True:
            try:
                two_workers.check_health()
                break
            except EngineDeadError:
                await asyncio.sleep(0.05)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_worker_is_red_at_once(two_workers: AsyncLLM, rank: int) -> None:
    pid = worker_pids(two_workers)[rank]
    busy = await keep_busy(two_workers)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"worker \d was ended by SIGKILL"):
        await busy
    red, why = await seconds_until_red(two_workers)
    assert red < 2 and "worker" in why


# A whole server with the real model, asked over HTTP.


def health(url: str) -> int:
    return httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code


async def test_a_real_server_over_http(smollm2_gguf: Path) -> None:
    flags = ("--max-model-len", "2048", "--num-kv-blocks", "80", "--max-num-batched-tokens", "2048")
    with ServerProcess(smollm2_gguf, *flags) as server:
        url = await asyncio.to_thread(server.wait_ready)
        assert health(url) == 200
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            body = {"prompt": "river " * 1900, "max_tokens": 1}
            prefill = asyncio.create_task(http.post("/v1/completions", json=body))
            seen = [(await http.get("/health")).status_code for _ in range(3)]
            while not prefill.done():
                seen.append((await http.get("/health")).status_code)
                await asyncio.sleep(0.05)
            assert set(seen) == {200} and len(seen) > 5, "a long legal prompt is green"
            assert prefill.result().status_code == 200
            core = server.core_pid()
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 400}))
            await asyncio.sleep(0.3)
            os.kill(core, signal.SIGSTOP)
            try:
                began = time.monotonic()
                while (await http.get("/health")).status_code == 200:
                    assert time.monotonic() - began < RED_WITHIN_S
                    await asyncio.sleep(0.1)
                assert (await http.get("/ready")).status_code == 503
            finally:
                os.kill(core, signal.SIGCONT)
            assert (await asking).status_code == 200
            assert (await http.get("/health")).status_code == 200
        assert await asyncio.to_thread(server.stop) == 0
