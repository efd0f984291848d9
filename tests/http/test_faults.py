"""A fault in one request's work ends that request alone, whatever the phase, however often, at any depth."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from headrace.base.errors import ControlFailedError
from headrace.frontend.parsers.answer_parser import AnswerParser
from headrace.frontend.parsers.events import ParsedDelta
from tests.http_service import MODEL, events_of
from tests.simulated_service import CORE_PHASES, PoisonError, SimulatedService, start_simulated

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[SimulatedService]:
    running = await start_simulated({"pipeline_depth": request.param})
    yield running
    await running.end()


async def neighbours(service: SimulatedService) -> list[Any]:
    """What eight mixed requests are answered, without ids and times."""

    async def ask(number: int) -> Any:
        body = {"model": MODEL, "prompt": f"neighbour {number}", "seed": number, "max_tokens": 20, "n": 1 + number % 2}
        return (await service.http.post(COMPLETION, json=body)).json()["choices"]

    return await asyncio.gather(*(ask(number) for number in range(8)))


async def culprit(service: SimulatedService, path: str, stream: bool, prompt: str = "culprit") -> httpx.Response:
    messages = [{"role": "user", "content": prompt}]
    asked: dict[str, Any] = {"prompt": prompt} if path == COMPLETION else {"messages": messages}
    body = {"model": MODEL, **asked, "seed": 1, "max_tokens": 20, "ignore_eos": True, "stream": stream}
    return await service.http.post(path, json=body, headers={"X-Request-Id": "culprit"})


def check_failed(reply: httpx.Response, stream: bool, late: bool) -> None:
    """A 500 before the first token, one error event after it; the cause is not told."""
    assert "SECRET" not in reply.text
    assert "/etc" not in reply.text
    assert "struck" not in reply.text
    if stream and late:
        events, done = events_of(reply.text)
        assert not done
        assert [event for event in events if "error" in event] == events[-1:]
        error = events[-1]["error"]
    else:
        assert reply.status_code == 500
        error = reply.json()["error"]
    assert error["type"] == "server_error"
    assert "culprit" in error["message"], "the request's id is named"


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", CORE_PHASES)
@pytest.mark.parametrize("at", [0, 16])
async def test_a_fault_in_a_step(
    service: SimulatedService, caplog: pytest.LogCaptureFixture, path: str, stream: bool, phase: str, at: int
) -> None:
    """B005 and the design's section on faults."""
    alone = await neighbours(service)
    prefix = "cmpl" if path == COMPLETION else "chatcmpl"
    start = 7 if path == COMPLETION else 24
    fault = {"phase": phase, "repeat": "always", "at": at and start + at}
    service.llm.faults[f"{prefix}-culprit"] = fault
    with caplog.at_level(logging.WARNING, logger="headrace"):
        beside, reply = await asyncio.gather(neighbours(service), culprit(service, path, stream))
    assert beside == alone
    check_failed(reply, stream, late=bool(at))
    assert any("culprit" in record.getMessage() for record in caplog.records), "the log names the request"
    await service.settles()


@pytest.mark.parametrize("phase", ["forward", "sample"])
async def test_a_fault_that_does_not_recur(service: SimulatedService, phase: str) -> None:
    alone = await neighbours(service)
    right = (await culprit(service, COMPLETION, False)).json()["choices"]
    service.llm.faults["cmpl-culprit"] = {"phase": phase, "repeat": "once", "at": 9}
    beside, reply = await asyncio.gather(neighbours(service), culprit(service, COMPLETION, False))
    assert (beside, reply.json()["choices"]) == (alone, right)
    await service.settles()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_in_detokenising(service: SimulatedService, stream: bool) -> None:
    alone = await neighbours(service)
    service.llm.faults["cmpl-culprit"] = {"phase": "detokenise"}
    beside, reply = await asyncio.gather(neighbours(service), culprit(service, COMPLETION, stream))
    assert beside == alone
    check_failed(reply, stream, late=False)
    await service.settles()


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_in_preparing(service: SimulatedService, path: str, stream: bool) -> None:
    alone = await neighbours(service)
    beside, reply = await asyncio.gather(neighbours(service), culprit(service, path, stream, "POISON"))
    assert beside == alone
    check_failed(reply, stream, late=False)
    await service.settles()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_in_reading_the_answer(
    service: SimulatedService, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The parsers of reasoning and calls, which only chats have; the request leaves the engine at once."""

    def feed(self: AnswerParser, text: str, token_ids: Sequence[int], final: bool) -> ParsedDelta:
        raise PoisonError

    alone = await neighbours(service)
    monkeypatch.setattr(AnswerParser, "feed", feed)
    beside, reply = await asyncio.gather(neighbours(service), culprit(service, CHAT, stream))
    assert beside == alone
    check_failed(reply, stream, late=True)
    await service.settles()


async def test_clients_cannot_reach_the_hook(service: SimulatedService) -> None:
    body = {"model": MODEL, "prompt": "a", "fault": {"phase": "forward"}}
    reply = await service.http.post(COMPLETION, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "fault")


async def test_a_refused_verb_tells_its_operator_why(service: SimulatedService) -> None:
    async def refuse(*_: Any) -> None:
        raise ControlFailedError("a profile is running already")

    service.llm.client.control = refuse  # type: ignore[method-assign]
    reply = await service.http.post("/start_profile")
    assert (reply.status_code, reply.json()["error"]["message"]) == (409, "a profile is running already")
