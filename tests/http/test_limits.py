"""Every limit of the operator: the limit passes, the limit plus one is refused by name, and others go on."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import QueueFullError
from headrace.config.sections import LimitsSection, ObservabilitySection, SchedulerSection
from headrace.core import grammar_backend
from headrace.entrypoints.openai.options import ServerOptions
from headrace.frontend.admission import Admission, QueueState
from headrace.testing.engine_config import make_engine_config
from tests.http.conftest import StartService
from tests.http_service import EOS

COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TURN = {"role": "user", "content": "Hi"}
BASES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "ab", "max_tokens": 2},
    CHAT: {"messages": [TURN], "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
}


def tools(count: int) -> dict[str, Any]:
    """Tools that nobody is shown, so that the prompt stays short."""
    return {"tools": [{"function": {"name": f"t{i}"}} for i in range(count)], "tool_choice": "none"}


def schema(value: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": value}}


NESTED: dict[str, Any] = {"type": "array", "items": {"type": "null"}}
NULL = {"type": "null"}
OUTPUTS = "structured_outputs.json"

# flag without dashes: value, route, what passes, what does not, the parameter that is named
LIMITS: list[tuple[str, int, str, dict[str, Any], dict[str, Any], str]] = [
    ("max_n", 2, COMPLETION, {"n": 2}, {"n": 3}, "n"),
    ("max_prompts", 2, COMPLETION, {"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt"),
    ("max_answers", 4, COMPLETION, {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a", "b"], "n": 3}, "n"),
    ("max_prompt_chars", 4, COMPLETION, {"prompt": "abcd"}, {"prompt": "abcde"}, "prompt"),
    ("max_messages", 2, CHAT, {"messages": [TURN] * 2}, {"messages": [TURN] * 3}, "messages"),
    ("max_messages", 2, RESPONSES, {"input": [TURN] * 2}, {"input": [TURN] * 3}, "input"),
    ("max_tools", 2, CHAT, tools(2), tools(3), "tools"),
    ("max_tools_chars", 64, CHAT, tools(2), tools(3), "tools"),
    ("max_stop_strings", 1, COMPLETION, {"stop": ["x"]}, {"stop": ["x", "y"]}, "stop"),
    ("max_stop_tokens", 1, COMPLETION, {"stop_token_ids": [1]}, {"stop_token_ids": [1, 2]}, "stop_token_ids"),
    ("max_bad_words", 1, COMPLETION, {"bad_words": ["x"]}, {"bad_words": ["x", "y"]}, "bad_words"),
    ("max_biased_tokens", 1, COMPLETION, {"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
    ("max_allowed_tokens", 1, COMPLETION, {"allowed_token_ids": [1]}, {"allowed_token_ids": [1, 2]},
     "allowed_token_ids"),
    ("max_logprob_entries", 4, COMPLETION, {"logprobs": 1}, {"logprobs": 2}, "logprobs"),
    ("max_logprobs", 3, COMPLETION, {"logprobs": 3}, {"logprobs": 4}, "logprobs"),
    ("max_grammar_chars", 4, COMPLETION, {"structured_outputs": {"regex": "abcd"}},
     {"structured_outputs": {"regex": "abcde"}}, "structured_outputs.regex"),
    ("max_schema_depth", 1, COMPLETION, schema(NESTED), schema({"type": "array", "items": NESTED}), OUTPUTS),
    ("max_schema_parts", 3, COMPLETION, schema({"anyOf": [NULL] * 2}), schema({"anyOf": [NULL] * 3}), OUTPUTS),
    ("max_schema_bytes", 16, COMPLETION, schema(NULL), schema({"type": "boolean"}), OUTPUTS),
]  # fmt: skip
ELSEWHERE = {
    "max_body": "test_refusals.test_body_limit",
    "grammar_timeout_s": "test_preparing_a_grammar_has_a_limit",
    "template_timeout_s": "tests/frontend/test_chat.py, and test_rendering_has_a_limit",
    "max_num_queued_reqs": "test_refusals.test_queue_limit",
    "max_num_queued_tokens": "test_a_full_queue_is_told_before_the_prompt_is_tokenised",
}
"""Tests of the limits whose refusal is another one."""


def flags_of_the_page() -> dict[str, float]:
    """Setting to its default, as the docs have it."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "parameters.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([0-9,]+)( MiB| s)? \|", page.partition("## Limits")[2], re.MULTILINE)
    scales = {" MiB": 1 << 20}
    return {name.replace("-", "_"): int(number.replace(",", "")) * scales.get(unit, 1) for name, number, unit in rows}


def test_the_page_names_every_limit_with_its_default() -> None:
    known: dict[str, Any] = {one.name: one.default for one in fields(LimitsSection)}
    known |= {"max_body": ServerOptions().max_body, "max_logprobs": ObservabilitySection().max_logprobs}
    section = SchedulerSection()
    known |= {name: getattr(section, name) for name in ("max_num_queued_reqs", "max_num_queued_tokens")}
    assert flags_of_the_page() == known


def test_every_limit_of_the_page_is_tried() -> None:
    assert {setting for setting, *_ in LIMITS} | ELSEWHERE.keys() == flags_of_the_page().keys()


@pytest.mark.parametrize(("setting", "value", "path", "passes", "refused", "param"), LIMITS, ids=lambda v: str(v)[:20])
async def test_limit(
    start_service: StartService,
    setting: str,
    value: int,
    path: str,
    passes: dict[str, Any],
    refused: dict[str, Any],
    param: str,
) -> None:
    service = await start_service(settings={setting: value})
    reply = await service.http.post(path, json={**BASES[path], **passes})
    assert reply.status_code == 200, reply.text
    for stream in (False, True):
        reply = await service.http.post(path, json={**BASES[path], **refused, "stream": stream})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
    assert service.llm.num_requests == 0


async def test_preparing_a_grammar_has_a_limit(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    compiled = grammar_backend.compile_grammar

    def slow(*args: Any) -> Any:
        release.wait(10)
        return compiled(*args)

    monkeypatch.setattr(grammar_backend, "compile_grammar", slow)
    service = await start_service(settings={"grammar_timeout_s": 0.1})
    asked = asyncio.create_task(service.complete(structured_outputs={"regex": "a"}))
    # Others go on meanwhile.
    assert (await service.complete()).status_code == 200
    reply = await asked
    release.set()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs.regex")
    assert "longer than 0.1 s" in reply.json()["error"]["message"]


async def test_rendering_has_a_limit(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("tests.http_service.TEMPLATE", endless)
    service = await start_service(settings={"template_timeout_s": 0.05})
    reply = await service.chat()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


async def test_long_bad_words_are_not_even_tokenised(start_service: StartService) -> None:
    service = await start_service()
    reply = await service.complete(bad_words=["x" * 9000])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "bad_words")


async def test_a_body_that_stops_coming(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.entrypoints.openai.body as body

    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    service = await start_service()
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(5):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_client_that_leaves_inside_its_body(
    start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    service = await start_service()
    host, port = service.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    while not service.context.num_in_flight:
        await asyncio.sleep(0.001)
    writer.close()
    async with asyncio.timeout(5):
        while service.context.num_in_flight:
            await asyncio.sleep(0.001)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_retry_after_follows_the_queues_pace() -> None:
    section = make_engine_config(max_num_queued_reqs=2, max_num_queued_tokens=100, max_num_seqs=1).scheduler
    admission = Admission(section)
    admission.note_busy(100.0)
    for end in (103.0, 106.0, 109.0):
        admission.note_finished(1, end, idle=False)
    admission.note_finished(1, 112.0, idle=True)
    # An hour without work says nothing.
    admission.note_busy(3700.0)
    admission.note_finished(1, 3703.0, idle=False)
    busy = QueueState(num_requests=3, num_unstarted=2, num_unstarted_tokens=80)
    with pytest.raises(QueueFullError) as caught:
        admission.check(busy, 3, 0)
    assert caught.value.limit == "max_num_queued_reqs"
    assert caught.value.retry_after_s == pytest.approx(3 * 3.0)
    with pytest.raises(QueueFullError) as caught:
        admission.check(QueueState(num_requests=1, num_unstarted=1, num_unstarted_tokens=40), 0, 140)
    assert caught.value.limit == "max_num_queued_tokens"
    assert caught.value.retry_after_s == pytest.approx(2 * 3.0)
    admission.check(QueueState(), 1, 10_000)


async def test_a_full_queue_is_told_before_the_prompt_is_tokenised(start_service: StartService) -> None:
    service = await start_service(auto=False, settings={"max_num_queued_tokens": 8, "max_num_seqs": 1})
    service.answer[:] = [EOS]
    first = asyncio.create_task(service.complete(prompt="abcdefgh"))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    reply = await service.complete(prompt="x")
    assert reply.status_code == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    service.core.step(2)
    assert (await first).status_code == 200
    assert (await asyncio.gather(service.complete(prompt="x", max_tokens=1), _steps(service)))[0].status_code == 200


async def _steps(service: Any) -> None:
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.core.step()


async def test_a_head_without_an_end(start_service: StartService) -> None:
    service = await start_service()
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")

    async def flood() -> None:
        for _ in range(1000):
            writer.write(b"x" * (64 << 10))
            await writer.drain()
            await asyncio.sleep(0)
        await reader.readexactly(1)

    async with asyncio.timeout(10):
        with pytest.raises((ConnectionError, EOFError)):
            await flood()
    writer.close()
    assert (await service.complete()).status_code == 200


@pytest.mark.parametrize("begun", [b"", b"GET /health HT"])
async def test_a_head_that_stops_coming(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    import headrace.entrypoints.openai.http_protocol as protocol

    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    service = await start_service()
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(begun)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_heads_one_after_another_are_counted_alone(start_service: StartService) -> None:
    service = await start_service()
    for _ in range(8):
        reply = await service.http.get("/health", headers={"X-Pad": "x" * 20_000})
        assert reply.status_code == 200
