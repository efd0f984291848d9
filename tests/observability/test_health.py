"""The fault matrix of ``/health``: red within ten seconds for what cannot go on, green for what only takes long."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from headrace.base.errors import EngineDeadError
from headrace.core.process_client import ProcessClient
from headrace.frontend.async_llm import AsyncLLM
from headrace.messages.sampling_params import SamplingParams
from headrace.testing.engine_config import make_engine_config
from tests.observability.live_service import EXECUTOR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
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
