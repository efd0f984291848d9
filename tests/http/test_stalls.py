"""Costly requests do not hold up others: how long the event loop stands still while they are worked on."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import httpx
import pytest

from headrace.entrypoints.openai.options import ServerOptions
from headrace.testing.engine_config import make_architecture
from tests.http.conftest import StartService
from tests.http_service import MODEL, Service

pytestmark = [pytest.mark.slow]

MAX_LEN = 8192
WORST_S = 1.0
BRIEF_S = 0.15
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


async def beat(gaps: list[float]) -> None:
    """Note how long each of many short sleeps took."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - began)


@pytest.mark.parametrize("name", COSTLY)
async def test_the_loop_goes_on(service: Service, name: str) -> None:
    gaps = [0.0]
    beating = asyncio.create_task(beat(gaps))
    body = {"model": MODEL, "prompt": "ab", **COSTLY[name]}
    reply = await service.http.post("/v1/completions", json=body, timeout=60)
    beating.cancel()
    assert reply.status_code in (200, 400)
    assert max(gaps) < WORST_S


def filled(size: int, field: str, unit: str, around: str = "[]", **body: Any) -> bytes:
    """A body of ``size`` whose ``field`` is a list (or an object) of units; ``#`` in one is a number of its own."""
    start = json.dumps({"model": MODEL, "max_tokens": 1, **body})[:-1] + f', "{field}": {around[0]}'
    count = (size - len(start) - 3) // (len(unit.replace("#", "1000000")) + 1)
    units = (unit.replace("#", str(number)) for number in range(10**6, 10**6 + count))
    return (start + ",".join(units) + around[1] + "}").encode()


CHAT = {"messages": [{"role": "user", "content": "x"}]}
PROMPT = {"prompt": "x"}
# what fills the body: route, field, the unit that it is filled with, what stands around, the rest of the body
LARGE: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "biases": ("completions", "logit_bias", '"#": 1', "{}", PROMPT),
    "stops": ("completions", "stop", '"ab"', "[]", PROMPT),
    "stop ids": ("completions", "stop_token_ids", "5", "[]", PROMPT),
    "allowed ids": ("completions", "allowed_token_ids", "5", "[]", PROMPT),
    "metadata": ("completions", "metadata", '"#": "v"', "{}", PROMPT),
    "prompts": ("completions", "prompt", '"a"', "[]", {}),
    "ids": ("completions", "prompt", "5", "[]", {}),
    "long ids": ("completions", "prompt", "1000000", "[]", {}),
    "lists of ids": ("completions", "prompt", "[5]", "[]", {}),
    "messages": ("chat/completions", "messages", '{"role":"user","content":"x"}', "[]", {}),
    "parts": ("chat/completions", "messages", '{"role":"user","content":[{"a":[]}]}', "[]", {}),
    "tools": ("chat/completions", "tools", "[]", "[]", CHAT),
    "numbers as tools": ("chat/completions", "tools", "5", "[]", CHAT),
    "a schema": ("chat/completions", "response_format", '"#": 1', "{}", CHAT),
    "an unknown field": ("chat/completions", "other", "[]", "[]", CHAT),
    "input": ("responses", "input", '{"role":"user","content":"x"}', "[]", {}),
    "one long text": (
        "chat/completions",
        "messages",
        '{"role":"user","content":"' + "a, " * 2_500_000 + '"}',
        "[]",
        {},
    ),
    "escapes": ("completions", "prompt", '"' + r"\n\\" * 1_700_000 + '"', "[]", {}),
    "arguments": (
        *("chat/completions", "messages"),
        json.dumps(
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" + "[]," * 2_000_000}}]}
        ),
        *("[]", {}),
    ),
}


@pytest.mark.parametrize("name", LARGE)
async def test_large_bodies_hold_nobody_up(start_service: StartService, name: str) -> None:
    service = await start_service()
    route, field, unit, around, rest = LARGE[name]
    content = filled(ServerOptions().max_body, field, unit, around, **rest)
    worst = []
    for _ in range(5):
        gaps = [0.0]
        beating = asyncio.create_task(beat(gaps))
        # Sent by another thread, as a client elsewhere would.
        reply = await asyncio.to_thread(post, f"{service.url}/v1/{route}", content)
        beating.cancel()
        assert reply.status_code == 400
        worst.append(max(gaps))
        if worst[-1] < BRIEF_S:
            break
    # The machine holds everybody up at times.
    assert min(worst) < BRIEF_S, worst


def post(url: str, content: bytes) -> httpx.Response:
    return httpx.post(url, content=content, headers={"Content-Type": "application/json"}, timeout=60, trust_env=False)
