"""The responses route: whole and streamed answers agree, items in every form, nothing stored, refusals by name."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText

from headrace.entrypoints.openai.responses_store import ResponseStore, StoredResponse
from headrace.testing.engine_config import make_architecture
from tests.http.conftest import StartService
from tests.http_service import MODEL, Service

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def ask(service: Service, **body: Any) -> Any:
    return await service.http.post(PATH, json={"model": MODEL, "input": "Hi", **body})


def typed(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def without_ids(value: Any) -> Any:
    """A response without what differs from run to run."""
    if isinstance(value, dict):
        skipped = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(item) for name, item in value.items() if name not in skipped}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def both(service: Service, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer and its events, which must say the same."""
    reply = await ask(service, **body)
    assert reply.status_code == 200, reply.text
    events = typed((await ask(service, stream=True, **body)).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert without_ids(events[-1]["response"]) == without_ids(reply.json())
    return reply.json(), events


async def test_text(service: Service) -> None:
    answer, events = await both(service, instructions="Be brief", metadata={"a": "b"})
    Response.model_validate(answer)
    (item,) = answer["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("message", "completed", "hello")
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens"] == 6
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "hello"
    kinds = [event["type"] for event in events]
    assert kinds.count("response.output_item.done") == kinds.count("response.output_item.added") == 1
    assert kinds[-1] == "response.completed"
    prompt = service.tokenizer.decode(service.core.added[0].prompt_token_ids)
    assert prompt == "<system>Be brief<user>Hi<assistant>"


async def test_a_cut_answer_is_incomplete(service: Service) -> None:
    answer, events = await both(service, max_output_tokens=2)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_items_in_every_form(service: Service) -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"role": "user", "content": "Z"},
    ]
    assert (await ask(service, input=items)).status_code == 200
    prompt = service.tokenizer.decode(service.core.added[0].prompt_token_ids)
    assert prompt == "<system>D<user>Q<assistant><tool>sunny<assistant>A<user>Z<assistant>"


async def test_tools(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.http_service.MAX_LEN", 1024)
    monkeypatch.setattr("tests.http_service.make_architecture", partial(make_architecture, max_position=1024))
    service = await start_service()
    service.say("Let me look. " + CALL_TEXT)
    answer, events = await both(service, tools=[WEATHER])
    Response.model_validate(answer)
    message, call = answer["output"]
    assert message["content"][0]["text"].strip() == "Let me look."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Rome"}
    assert answer["tools"][0]["name"] == "get_weather"


WITH_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def shown_logprobs(events: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Text and logprobs of each message of a stream, by its deltas alone."""
    items: dict[int, tuple[str, list[Any]]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            text, entries = items.get(event["output_index"], ("", []))
            items[event["output_index"]] = (text + event["delta"], entries + event["logprobs"])
    return list(items.values())


@pytest.mark.parametrize("stop", [None, ["lzzz", "o"]])
async def test_logprobs(service: Service, stop: list[str] | None) -> None:
    answer, events = await both(service, **WITH_LOGPROBS, stop=stop)
    Response.model_validate(answer)
    part = answer["output"][0]["content"][0]
    assert answer["top_logprobs"] == 2
    # The token that ended the text is no text.
    wanted = "hell" if stop else "hello"
    assert part["text"] == wanted
    entries = part["logprobs"]
    assert [entry["token"] for entry in entries][: len(wanted)] == list(wanted)
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] == list(entry["token"].encode()) for entry in entries)
    ((text, told),) = shown_logprobs(events)
    assert (text, told) == (wanted, entries)
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == entries


async def test_logprobs_go_with_the_item_of_their_tokens(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.http_service.MAX_LEN", 1024)
    monkeypatch.setattr("tests.http_service.make_architecture", partial(make_architecture, max_position=1024))
    service = await start_service(settings={"reasoning_parser": "qwen3"})
    service.say("<think>hm</think>Look. " + CALL_TEXT + "Done é.")
    answer, events = await both(service, tools=[WEATHER], **WITH_LOGPROBS)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "message"]
    texts = []
    for item in answer["output"]:
        if item["type"] == "message":
            (part,) = item["content"]
            made = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode()
            texts.append((part["text"], made))
    assert texts == [("Look.", "Look."), ("Done é.", "Done é.")]
    assert [text for text, _ in shown_logprobs(events)] == ["Look.", "Done é."]


async def test_allowed_tools(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.http_service.MAX_LEN", 1024)
    monkeypatch.setattr("tests.http_service.make_architecture", partial(make_architecture, max_position=1024))
    service = await start_service()
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    service.say('[{"name": "get_weather", "arguments": {"city": "Rome"}}]')
    answer, _ = await both(service, tools=[WEATHER, {**WEATHER, "name": "other"}], tool_choice=choice)
    assert [item["name"] for item in answer["output"]] == ["get_weather"]
    assert answer["tool_choice"] == choice


async def test_the_official_client(start_service: StartService) -> None:
    service = await start_service()
    client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none")
    try:
        answer = await client.responses.create(model=MODEL, input="Hi")
        assert answer.output_text == "hello"
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "hello"
        assert kinds[-1] == "response.completed"
        scored = await client.responses.create(
            model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        assert isinstance(scored.output[0], ResponseOutputMessage)
        (part,) = scored.output[0].content
        assert isinstance(part, ResponseOutputText) and part.logprobs is not None
        assert [entry.token for entry in part.logprobs] == list("hello")
    finally:
        await client.close()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "logprobs"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"stream_options": {}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refusals(service: Service, body: dict[str, Any], param: str) -> None:
    for stream in (False, *(() if param == "stream_options" else (True,))):
        reply = await ask(service, stream=stream, **body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param


async def test_what_clients_always_send(service: Service) -> None:
    body = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "user": "me",
        "background": False,
    }
    reply = await ask(service, **body)
    assert reply.status_code == 200, reply.text


async def test_nothing_is_stored(service: Service) -> None:
    name = (await ask(service)).json()["id"]
    for method in ("GET", "DELETE"):
        reply = await service.http.request(method, f"{PATH}/{name}")
        assert reply.status_code == 404 and "--response-store" in reply.json()["error"]["message"]


async def test_stored_answers(start_service: StartService) -> None:
    service = await start_service(response_store=1 << 20)
    client = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    async with client:
        first = await client.responses.create(model=MODEL, input="Q1", instructions="I1", store=True)
        assert first.store
        again = await client.responses.retrieve(first.id)
        assert without_ids(again.model_dump()) == without_ids(first.model_dump())
        listed = [item async for item in client.responses.input_items.list(first.id)]
        assert [item.content[0].text for item in listed] == ["Q1"]  # type: ignore[union-attr]
        service.say("second")
        async with client.responses.stream(model=MODEL, input="Q2", previous_response_id=first.id) as stream:
            second = await stream.get_final_response()
        assert second.previous_response_id == first.id
        told = service.tokenizer.decode(service.core.added[-1].prompt_token_ids)
        assert told == "<user>Q1<assistant>hello<user>Q2<assistant>", "instructions are not carried on"
        third = await client.responses.create(model=MODEL, input="Q3", previous_response_id=second.id, store=False)
        told = service.tokenizer.decode(service.core.added[-1].prompt_token_ids)
        assert told == "<user>Q1<assistant>hello<user>Q2<assistant>second<user>Q3<assistant>"
        for missing in (third.id, "resp_no"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(missing)
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(model=MODEL, input="x", previous_response_id=missing)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        assert (await client.responses.retrieve(second.id)).output_text == "second"


async def test_stored_answers_are_their_makers_alone(start_service: StartService) -> None:
    service = await start_service(response_store=1 << 20, api_key=("one", "two"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    name = (await service.http.post(PATH, json={"input": "Hi"}, headers=mine)).json()["id"]
    for method, path in (("GET", name), ("GET", f"{name}/input_items"), ("DELETE", name)):
        assert (await service.http.request(method, f"{PATH}/{path}", headers=theirs)).status_code == 404
        assert (await service.http.request(method, f"{PATH}/{path}")).status_code == 401
    body = {"input": "Hi", "previous_response_id": name}
    assert (await service.http.post(PATH, json=body, headers=theirs)).status_code == 400
    assert (await service.http.get(f"{PATH}/{name}", headers=mine)).status_code == 200


async def test_input_items_in_pages(start_service: StartService) -> None:
    service = await start_service(response_store=1 << 20)
    items = [{"role": "user", "content": text} for text in "abc"]
    name = (await ask(service, input=items)).json()["id"]

    async def page(query: str) -> dict[str, Any]:
        reply = await service.http.get(f"{PATH}/{name}/input_items?{query}")
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    first = await page("limit=2")
    assert [item["content"] for item in first["data"]] == ["c", "b"] and first["has_more"]
    rest = await page(f"after={first['last_id']}")
    assert [item["content"] for item in rest["data"]] == ["a"] and not rest["has_more"]
    assert [item["content"] for item in (await page("order=asc"))["data"]] == ["a", "b", "c"]
    for query in ("limit=0", "limit=x", "limit=101", "order=up", "after=nope"):
        assert (await service.http.get(f"{PATH}/{name}/input_items?{query}")).status_code == 400
    assert (await service.http.get(f"{PATH}/{name}?stream=true")).status_code == 400


def test_the_store_keeps_the_newest_that_fit() -> None:
    store = ResponseStore(100)
    for number in range(5):
        store.put(None, f"r{number}", StoredResponse(b"x" * 40, b"", b""))
    assert [store.get(None, f"r{number}") is not None for number in range(5)] == [False, False, False, True, True]
    store.put(None, "r4", StoredResponse(b"x" * 60, b"", b""))
    assert store.get(None, "r3") is not None and store.get("other", "r4") is None
    store.put(None, "huge", StoredResponse(b"x" * 101, b"", b""))
    assert store.get(None, "huge") is None and store.get(None, "r4") is not None
    assert store.remove(None, "r4") and not store.remove(None, "r4")
    assert not ResponseStore(0).is_on


async def test_faults_are_typed_events(start_service: StartService) -> None:
    import asyncio

    service = await start_service(auto=False)
    pending = asyncio.create_task(ask(service, stream=True))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.core.step()
    await asyncio.sleep(0.05)
    service.core.die("RuntimeError: SECRET")
    events = typed((await pending).text)
    assert events[-1]["type"] == "error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "the engine has stopped: RuntimeError" in events[-1]["message"]
    assert "SECRET" not in json.dumps(events[-1])
