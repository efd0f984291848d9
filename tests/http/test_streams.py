"""Streams: chunk order, ends, errors and what is held back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.base.errors import EngineDeadError
from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from tests.http.conftest import StartService
from tests.http_service import MODEL, Service, events_of

USAGE = {"include_usage": True}


async def send(service: Service, route: str, **body: Any) -> tuple[list[dict[str, Any]], bool]:
    body = {"max_tokens": 6, "stream": True, **body}
    reply = await (service.chat(**body) if route == "chat" else service.complete(**body))
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


def choices_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.mark.parametrize("route", ["chat", "completion"])
@pytest.mark.parametrize("n", [1, 2])
async def test_usage_chunk(service: Service, route: str, n: int) -> None:
    """B001."""
    service.say("hello world", end=False)
    events, done = await send(service, route, n=n, temperature=1, stream_options=USAGE)
    assert done
    assert [event for event in events if event.get("usage")] == events[-1:]
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 6 * n
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6 * n
    events, done = await send(service, route)
    assert done
    assert all(event["choices"] and not event.get("usage") for event in events)


@pytest.mark.parametrize("route", ["chat", "completion"])
async def test_usage_on_each_chunk_only_when_asked(service: Service, route: str) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    events, _ = await send(service, route, stream_options=options)
    assert all(event["usage"] for event in events)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6


@pytest.mark.parametrize("route", ["chat", "completion"])
async def test_one_finish_per_choice(service: Service, route: str) -> None:
    """B002."""
    events, done = await send(service, route, n=3, temperature=1, seed=1)
    assert done
    for index in range(3):
        choices = choices_of(events, index)
        finished = [place for place, choice in enumerate(choices) if choice["finish_reason"]]
        assert finished == [len(choices) - 1]


async def test_chat_begins_with_the_role(service: Service) -> None:
    service.say("hi")
    events, _ = await send(service, "chat", n=2, temperature=1)
    for index in range(2):
        choices = choices_of(events, index)
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(map(text_of, choices)) == "hi"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("route", ["chat", "completion"])
@pytest.mark.parametrize("stop", [None, ["Z" * 20], ["lo w"], ["d"]])
async def test_stream_equals_the_whole_answer(service: Service, route: str, stop: list[str] | None) -> None:
    """B004, B007."""
    service.say('hello wörld "quoted" \\ 😀\n')
    body = {"max_tokens": 60, "stop": stop}
    events, _ = await send(service, route, **body)
    choices = choices_of(events, 0)
    reply = (await (service.chat(**body) if route == "chat" else service.complete(**body))).json()["choices"][0]
    whole = reply["message"]["content"] if route == "chat" else reply["text"]
    assert "".join(map(text_of, choices)) == whole
    assert choices[-1]["finish_reason"] == reply["finish_reason"]
    assert choices[-1]["stop_reason"] == reply["stop_reason"]


async def test_text_is_not_held_back_for_an_unlikely_stop_string(start_service: StartService) -> None:
    """B004: each token's text leaves with the token."""
    service = await start_service(auto=False)
    service.say("hello")
    body = {"prompt": "a", "stream": True, "stop": ["Z" * 20]}
    pending = asyncio.create_task(_first_chunks(service, body))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.core.step()
    assert (await pending)[0]["choices"][0]["text"] == "h"


async def _first_chunks(service: Service, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with service.http.stream("POST", "/v1/completions", json={"model": MODEL, **body}) as reply:
        async for data in reply.aiter_text():
            return events_of(data)[0]
    raise AssertionError("the stream was empty")


async def test_prompt_lists_stream_by_index(service: Service) -> None:
    """B083."""
    service.say("abc")
    events, done = await send(service, "completion", prompt=[str(number) for number in range(20)])
    assert done
    for index in range(20):
        assert "".join(map(text_of, choices_of(events, index))) == "abc"


@pytest.mark.parametrize("route", ["chat", "completion"])
@pytest.mark.parametrize("body", [{"n": 0}, {"temperature": -1}, {"top_p": 7}])
async def test_bad_fields_are_refused_before_the_stream(service: Service, route: str, body: dict[str, Any]) -> None:
    """B005, the validation half."""
    reply = await (service.chat if route == "chat" else service.complete)(stream=True, **body)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("route", ["chat", "completion"])
async def test_a_fault_after_the_first_token_is_one_event(start_service: StartService, route: str) -> None:
    """B005, the other half."""
    service = await start_service(auto=False)
    body: dict[str, Any] = {"stream": True, "max_tokens": 9}
    pending = asyncio.create_task((service.chat if route == "chat" else service.complete)(**body))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.core.step()
    request_id = service.core.added[0].request_id
    output = EngineCoreOutput(
        request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error="sampling failed"
    )
    await asyncio.sleep(0.05)
    service.core.send(EngineCoreOutputs(outputs=[output]))
    events, done = events_of((await pending).text)
    assert not done
    assert [event for event in events if "error" in event] == events[-1:]
    message = events[-1]["error"]["message"]
    assert "failed inside the engine" in message
    assert "sampling failed" not in message, "causes are for the log"


async def test_a_fault_before_the_first_token_is_an_answer(start_service: StartService) -> None:
    service = await start_service(auto=False)
    pending = asyncio.create_task(service.complete(stream=True))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.core.die("worker 0 failed: MemoryError: SECRET at /etc/secret")
    reply = await pending
    assert reply.status_code == 503
    message = reply.json()["error"]["message"]
    assert "worker 0 failed: MemoryError; the server's log has the details" in message
    assert "SECRET" not in reply.text and "/etc" not in reply.text


async def test_death_ends_streams(start_service: StartService) -> None:
    service = await start_service(auto=False)
    pending = asyncio.create_task(service.complete(stream=True))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.core.step()
    await asyncio.sleep(0.05)
    service.core.die("killed by SIGKILL")
    events, done = events_of((await pending).text)
    assert not done
    assert "the engine has stopped: killed by SIGKILL" in events[-1]["error"]["message"]
    with pytest.raises(EngineDeadError):
        service.llm.check_health()
