"""Sleep and wake over HTTP: who is refused, who is ended, and who goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.simulated_service import CANARY, SimulatedService, start_simulated

BODY = {**CANARY, "max_tokens": 60}


@pytest.fixture
async def service() -> AsyncIterator[SimulatedService]:
    running = await start_simulated(step_s=0.002)
    yield running
    await running.settles()
    await running.end()


async def is_sleeping(service: SimulatedService) -> bool:
    answer: dict[str, bool] = (await service.http.get("/is_sleeping")).json()
    return answer["is_sleeping"]


@pytest.mark.parametrize("level", [1, 2])
async def test_asleep_nothing_is_taken(service: SimulatedService, level: int) -> None:
    before = await service.canary()
    assert not await is_sleeping(service)
    reply = await service.http.post(f"/sleep?level={level}")
    assert (reply.status_code, reply.json()) == (200, {"status": "sleeping", "level": level})
    assert await is_sleeping(service)
    reply = await service.http.post("/v1/completions", json=BODY)
    assert (reply.status_code, "sleeps" in reply.json()["error"]["message"]) == (503, True)
    assert int(reply.headers["retry-after"]) >= 1
    assert [(await service.http.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
    reply = await service.http.post("/wake_up?tags=weights")
    assert reply.json() == {"status": "sleeping", "tags": ["weights"]}
    reply = await service.http.post("/wake_up")
    assert reply.json() == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert (await service.http.get("/ready")).status_code == 200
    assert await service.canary() == before


@pytest.mark.parametrize(("mode", "finish_reason"), [("abort", "abort"), ("wait", "length"), ("keep", "length")])
async def test_what_becomes_of_those_that_run(service: SimulatedService, mode: str, finish_reason: str) -> None:
    alone = (await service.http.post("/v1/completions", json=BODY)).json()["choices"][0]
    asking = asyncio.create_task(service.http.post("/v1/completions", json=BODY))
    while not service.llm.stats.num_running:
        await asyncio.sleep(0.001)
    assert (await service.http.post(f"/sleep?mode={mode}")).status_code == 200
    assert asking.done() or service.llm.num_requests == (mode == "keep")
    assert (await service.http.post("/wake_up")).status_code == 200
    choice = (await asking).json()["choices"][0]
    assert choice["finish_reason"] == finish_reason
    assert alone["text"].startswith(choice["text"])
    assert mode == "abort" or choice["text"] == alone["text"]


@pytest.mark.parametrize(
    ("path", "param"),
    [("/sleep?level=0", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=x", "mode"), ("/wake_up?tags=x", "tags")],
)
async def test_what_is_not_known_is_refused(service: SimulatedService, path: str, param: str) -> None:
    reply = await service.http.post(path)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not await is_sleeping(service)


async def test_the_key_guards_them() -> None:
    running = await start_simulated(api_key=("secret",))
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert (await running.http.request(method, path)).status_code == 401
    await running.end()
