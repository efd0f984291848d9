"""A client that hangs up frees what it held within a step, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.http.conftest import StartService
from tests.http_service import MODEL, Service

CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "n": 3, "temperature": 1}),
    ("/v1/completions", {"prompt": ["a", "b", "c", "d"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
]


async def connect(service: Service, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Send a request and return the connection."""
    host, port = service.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"model": MODEL, "max_tokens": 50, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return writer


async def until(condition: Any) -> None:
    async with asyncio.timeout(3):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("path", "body"), CASES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
async def test_hangup_aborts(
    start_service: StartService, path: str, body: dict[str, Any], stream: bool, steps: int
) -> None:
    """B014, B020, B089."""
    service = await start_service(auto=False)
    service.say("x" * 100, end=False)
    writer = await connect(service, path, {**body, "stream": stream})
    await until(lambda: service.core.num_running == max(1, len(service.core.added)) and service.core.num_running)
    running = service.core.num_running
    for _ in range(steps):
        service.core.step()
        await asyncio.sleep(0.005)
    writer.close()
    await until(lambda: service.core.num_running == 0)
    assert service.llm.num_requests == 0
    assert sum(map(len, service.core.aborted)) == max(running, len(service.core.added))
    await until(lambda: service.context.num_in_flight == 0)


async def test_a_hangup_touches_only_its_own(start_service: StartService) -> None:
    """B019, B031: the same client-given id."""
    service = await start_service(auto=False)
    service.say("abc")
    staying = asyncio.create_task(service.complete(request_id="same", stream=True))
    await until(lambda: service.core.num_running == 1)
    leaving = await connect(service, "/v1/completions", {"prompt": "a", "request_id": "same"})
    await until(lambda: service.core.num_running == 2)
    leaving.close()
    await until(lambda: service.core.num_running == 1)
    service.core.step(4)
    reply = await staying
    assert reply.text.endswith("data: [DONE]\n\n")
