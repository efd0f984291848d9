"""Costly requests do not hold up others: how long the event loop stands still while they are worked on."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from headrace.testing.engine_config import make_architecture
from tests.http.conftest import StartService
from tests.http_service import MODEL, Service

pytestmark = [pytest.mark.slow]

MAX_LEN = 8192
WORST_S = 1.0
COSTLY: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"prompt": [5] * 8000, "prompt_logprobs": 20},
    "echoed logprobs": {"prompt": "a b" * 2600, "echo": True, "logprobs": 20},
    "many prompts": {"prompt": ["ab c" * 375] * 1024, "max_tokens": 1},
    "many ids": {"prompt": [[5] * 8000] * 200, "max_tokens": 1},
    "a huge prompt": {"prompt": "x" * 8_000_000},
    "long stops": {"stop": ["ab" * 512] * 8},
    "bad words": {"bad_words": ["w" * 60] * 100},
    "a wide schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "wide",
                "schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
            },
        }
    },
}


@pytest.fixture
async def service(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr("tests.http_service.MAX_LEN", MAX_LEN)
    monkeypatch.setattr("tests.http_service.make_architecture", partial(make_architecture, max_position=MAX_LEN))
    return await start_service()


@pytest.mark.parametrize("name", COSTLY)
async def test_the_loop_goes_on(service: Service, name: str) -> None:
    gaps = [0.0]

    async def beat() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - began)

    beating = asyncio.create_task(beat())
    body = {"model": MODEL, "prompt": "ab", **COSTLY[name]}
    reply = await service.http.post("/v1/completions", json=body, timeout=60)
    beating.cancel()
    assert reply.status_code in (200, 400)
    assert max(gaps) < WORST_S
