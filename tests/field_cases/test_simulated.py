"""Field cases over the real server and core with pseudo tokens, each named by its id."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.http_service import MODEL
from tests.simulated_service import SimulatedService, start_simulated

COMPLETION = "/v1/completions"


async def ask(service: SimulatedService, prompt: str, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "seed": 1, "max_tokens": 30, "ignore_eos": True, **more}
    return (await service.http.post(COMPLETION, json=body)).json()


@pytest.mark.slow
async def test_b040_something_always_moves() -> None:
    """Random lengths, hang-ups and n over a small pool in small chunks: nobody waits while nothing runs."""
    settings = {"num_kv_blocks": 40, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 96}
    service = await start_simulated(settings)
    rng = random.Random(40)
    stop = asyncio.Event()
    standstills: list[float] = []

    async def watch() -> None:
        loop, since = asyncio.get_running_loop(), None
        while not stop.is_set():
            stats = service.llm.stats
            stuck = stats.num_waiting > 0 and stats.num_running == 0
            since = (since or loop.time()) if stuck else None
            standstills.append(loop.time() - since if since else 0.0)
            await asyncio.sleep(0.002)

    async def one(number: int) -> None:
        body = {"prompt": "x" * rng.randrange(1, 60), "max_tokens": rng.randrange(1, 30), "n": rng.randrange(1, 5)}
        patience = rng.choice([None, None, 0.01, 0.05])
        try:
            reply = await service.http.post(COMPLETION, json={"model": MODEL, **body}, timeout=patience or 30.0)
            assert reply.status_code == 200
        except httpx.TimeoutException:
            assert patience is not None

    try:
        watching = asyncio.create_task(watch())
        for start in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        stop.set()
        await watching
        assert max(standstills) < 1.0
        await service.settles()
    finally:
        await service.end()


async def test_b034_b092_preemption_over_http() -> None:
    """Crowded answers equal those given alone, and nothing recomputed counts as a hit."""
    service = await start_simulated({"num_kv_blocks": 30, "max_num_seqs": 6, "max_model_len": 96})
    try:
        prompts = [f"{number} distinct" for number in range(6)]
        crowded = await asyncio.gather(*(ask(service, prompt, max_tokens=60) for prompt in prompts))
        assert await service.gauge("vllm:num_preemptions_total") > 0
        assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for one in crowded)
        assert await service.gauge("vllm:prefix_cache_hits_total") == 0
        await service.settles()
        alone = [await ask(service, prompt, max_tokens=60) for prompt in prompts]
        assert [one["choices"] for one in crowded] == [one["choices"] for one in alone]
    finally:
        await service.end()


async def test_b035_urgent_requests_pass() -> None:
    service = await start_simulated(
        {"num_kv_blocks": 30, "max_num_seqs": 6, "max_model_len": 96, "scheduling_policy": "priority"}, step_s=0.001
    )
    ended: list[int] = []

    async def run(priority: int, number: int) -> Any:
        reply = await ask(service, f"{priority} {number}", max_tokens=60, priority=priority)
        ended.append(priority)
        return reply["choices"]

    try:
        patient = [asyncio.create_task(run(5, number)) for number in range(3)]
        while service.llm.stats.num_running < 3:
            await asyncio.sleep(0.001)
        urgent = [asyncio.create_task(run(0, number)) for number in range(3)]
        crowded = [await task for task in (*patient, *urgent)]
        assert ended[:2] == [0, 0]
        await service.settles()
        order = [(5, number) for number in range(3)] + [(0, number) for number in range(3)]
        assert crowded == [await run(*one) for one in order]
    finally:
        await service.end()


async def test_b098_salts_keep_caches_apart() -> None:
    service = await start_simulated()
    try:

        async def cached(salt: str | None) -> int:
            more = {} if salt is None else {"cache_salt": salt}
            usage = (await ask(service, "y" * 60, max_tokens=1, **more))["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(salt) for salt in ("a", "a", "b", None, None)] == [0, 56, 0, 0, 56]
    finally:
        await service.end()


async def test_b022_scoring_without_a_token() -> None:
    service = await start_simulated()
    try:
        body = {"max_tokens": 0, "echo": True, "logprobs": 1}
        choice = (await ask(service, "Is water wet? No", **body))["choices"][0]
        assert choice["text"] == "Is water wet? No"
        assert len(choice["logprobs"]["tokens"]) == 16
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert (await ask(service, "ok", max_tokens=0))["usage"]["completion_tokens"] == 0
        await service.settles()
    finally:
        await service.end()
