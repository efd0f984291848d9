"""Render, generate and abort: the same request in two steps gives what it gives in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.http_service import MODEL, events_of
from tests.simulated_service import SimulatedService, start_simulated

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def service() -> AsyncIterator[SimulatedService]:
    running = await start_simulated()
    yield running
    await running.settles()
    await running.end()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_two_steps_equal_one(service: SimulatedService, path: str) -> None:
    asked: dict[str, Any] = {"prompt": ["one", "two"]} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {"model": MODEL, **asked, "seed": 3, "n": 2, "stop": ["\n"], "return_token_ids": True, "cache_salt": "s"}
    whole = (await service.http.post(path, json={**body, "max_tokens": 9})).json()
    rendered = (await service.http.post(f"{path}/render", json={**body, "max_tokens": 9})).json()
    rendered = rendered if isinstance(rendered, list) else [rendered]
    choices = []
    for one in rendered:
        assert one["cache_salt"] == "s"
        assert one["features"] is None
        reply = await service.http.post(GENERATE, json=one)
        assert reply.status_code == 200, reply.text
        choices += reply.json()["choices"]
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in whole["choices"]]
    assert [c["finish_reason"] for c in choices] == [c["finish_reason"] for c in whole["choices"]]


async def test_streamed_and_whole_answers_agree(service: SimulatedService) -> None:
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"seed": 1, "max_tokens": 12, "n": 2, "ignore_eos": True},
        "output_mode": "text",
    }
    whole = (await service.http.post(GENERATE, json=body)).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events, done = events_of((await service.http.post(GENERATE, json=asked)).text)
    assert done
    for choice in whole["choices"]:
        own = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [i for c in own for i in c["token_ids"]] == choice["token_ids"]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 24


async def test_tokens_alone_have_no_text(service: SimulatedService) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "seed": 1}}
    choice = (await service.http.post(GENERATE, json=body)).json()["choices"][0]
    assert set(choice) == {"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [300]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": 3}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"unknown": 3}}, "sampling_params.unknown"),
        ({"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}}}, "features"),
        ({"token_ids": [1], "kv_transfer_params": {}}, "kv_transfer_params"),
        ({"token_ids": [1], "stream_options": {}}, "stream_options"),
        ({"token_ids": [1], "output_mode": "image"}, "output_mode"),
        ({"token_ids": [1], "priority": 1}, "priority"),
    ],
)
async def test_refusals(service: SimulatedService, body: dict[str, Any], param: str) -> None:
    reply = await service.http.post(GENERATE, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_rendering_refuses_what_the_route_refuses(service: SimulatedService) -> None:
    for path in ("/v1/completions/render", "/v1/chat/completions/render"):
        reply = await service.http.post(path, json={"prompt": "a", "messages": MESSAGES})
        assert reply.status_code == 400
    reply = await service.http.post("/v1/completions/render", json={"prompt": "x" * 200})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_aborting_by_name() -> None:
    service = await start_simulated(step_s=0.005)
    try:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 100, "ignore_eos": True, "request_id": "mine"}
        running = asyncio.create_task(service.http.post("/v1/completions", json=body))
        other = asyncio.create_task(service.http.post("/v1/completions", json={**body, "request_id": "other"}))
        while service.llm.num_requests < 2:
            await asyncio.sleep(0.001)
        service.context.draining = True
        reply = await service.http.post(ABORT, json={"request_ids": ["mine", "never", "mine"]})
        assert reply.json() == {"num_aborted": 1}
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        assert (await service.http.post(ABORT, json={"request_ids": ["mine"]})).json() == {"num_aborted": 0}
        await service.settles()
    finally:
        await service.end()


async def test_a_key_aborts_only_what_it_sent() -> None:
    service = await start_simulated(step_s=0.005, api_key=("one", "two"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    try:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 100, "ignore_eos": True, "request_id": "mine"}
        running = asyncio.create_task(service.http.post("/v1/completions", json=body, headers=mine))
        while service.llm.num_requests < 1:
            await asyncio.sleep(0.001)
        reply = await service.http.post(ABORT, json={"request_ids": ["mine"]}, headers=theirs)
        assert reply.json() == {"num_aborted": 0}
        reply = await service.http.post(ABORT, json={"request_ids": ["mine"]}, headers=mine)
        assert reply.json() == {"num_aborted": 1}
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
    finally:
        await service.end()
