"""A real server and model under a mixed load: every request is explained, every decision can be made again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from headrace.core.replay import Replay, read_recording, trace_recording
from tests.http.server_process import ServerProcess
from tests.observability.test_trace import check_trace

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
NUM_REQUESTS = 220
MIN_STEPS = 2000
TOPICS = ("rivers", "clouds", "bread", "bridges", "whales", "lamps")
SYSTEM = "You answer in plain words and never invent facts. " * 8
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
# Few blocks, so that requests are preempted; little that runs at once, so that they wait and steps are many.
FLAGS = ("--max-model-len", "512", "--num-kv-blocks", "36", "--max-num-seqs", "8", "--watermark", "0")


def make_body(random: Random, number: int) -> tuple[str, dict[str, Any]]:
    """A request of one of five kinds."""
    topic = random.choice(TOPICS)
    body: dict[str, Any] = {"max_tokens": random.randint(40, 160), "temperature": 0.7, "seed": number}
    body |= {"priority": random.randint(-2, 2), "stream": random.random() < 0.5, "ignore_eos": random.random() < 0.7}
    match random.randrange(5):
        case 0:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Tell me about {topic}."}]
            return "/v1/chat/completions", body | {"messages": messages}
        case 1:
            return "/v1/completions", body | {"prompt": f"A long story about {topic}. " * random.randint(1, 30)}
        case 2:
            schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
            messages = [{"role": "user", "content": f"Somebody who likes {topic}, as JSON."}]
            return "/v1/chat/completions", body | {"messages": messages, "response_format": schema, "ignore_eos": False}
        case 3:
            return "/v1/completions", body | {"prompt": f"What is {topic}?", "n": 2}
        case _:
            return "/v1/completions", body | {"prompt": f"Once {topic} ", "cache_salt": f"team-{number % 2}"}


async def send(http: httpx.AsyncClient, number: int) -> None:
    """One request after a while; some are given up in the middle."""
    random = Random(number)
    path, body = make_body(random, number)
    await asyncio.sleep(random.random() * 30)
    headers = {"X-Request-Id": f"r{number}"}
    async with http.stream("POST", path, json=body, headers=headers) as reply:
        assert reply.status_code == 200, (await reply.aread()).decode()
        lines = 0
        async for _ in reply.aiter_lines():
            lines += 1
            if body["stream"] and number % 12 == 0 and lines > 12:
                return


async def explain_all(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    found = []
    for number in range(NUM_REQUESTS):
        reply = await http.get(f"/v1/requests/r{number}/explain")
        assert reply.status_code == 200
        found += reply.json().get("answers", [reply.json()])
    return found


async def test_a_mixed_load_is_explained_and_repeated(smollm2_gguf: Path, tmp_path: Path) -> None:
    recording = tmp_path / "run.rec"
    flags = (*FLAGS, "--scheduling-policy", "priority", "--record", str(recording))
    with ServerProcess(smollm2_gguf, *flags) as server:
        url = await asyncio.to_thread(server.wait_ready)
        limits = httpx.Limits(max_connections=NUM_REQUESTS)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=900, limits=limits) as http:
            await asyncio.gather(*(send(http, number) for number in range(NUM_REQUESTS)))
            explanations = await explain_all(http)
        assert await asyncio.to_thread(server.stop) == 0
    assert len(explanations) >= 200
    low = [(e["id"], e["attributed_share"]) for e in explanations if e["attributed_share"] < 0.99]
    assert not low
    causes = {cause for e in explanations for cause in e["totals_ms"]}
    assert causes >= {"tokenise", "prefill", "decode", "preempted", "recompute", "waiting_priority"}
    assert {e["finish_reason"] for e in explanations} >= {"length", "stop", "abort"}
    known = {e["id"] for e in explanations}
    assert all(one["for"] in known for e in explanations for one in e["preemptions"])

    result = Replay(str(recording)).run()
    assert result.difference is None, result.difference
    assert result.num_steps >= MIN_STEPS
    assert any(entry[0] == "finish" for entry in list(read_recording(str(recording)))[1:]), "nothing was given up"
    check_trace(trace_recording(str(recording)))
