"""Shapes of whole answers."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.http_service import EOS, MAX_LEN, MODEL, Service, events_of


async def test_completion(service: Service) -> None:
    service.say("hello")
    reply = await service.complete(max_tokens=20)
    answer = reply.json()
    assert reply.status_code == 200, answer
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    choice = answer["choices"][0]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 6, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("limit", [None, "absent"])
async def test_completion_limit_defaults_to_16(service: Service, limit: Any) -> None:
    service.say("x" * 40, end=False)
    body = {} if limit == "absent" else {"max_tokens": None}
    answer = (await service.complete(**body)).json()
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_prompt_forms(service: Service) -> None:
    for prompt, count in (("ab", 1), (["ab", "c"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        answer = (await service.complete(prompt=prompt, n=2, temperature=1)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
        assert {choice["text"] for choice in answer["choices"]} == {"hello"}
        assert answer["usage"]["completion_tokens"] == 2 * count * 6


async def test_echo_scores_a_prompt_without_generating(service: Service) -> None:
    answer = (await service.complete(prompt="cab", echo=True, max_tokens=0, logprobs=1)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "cab"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["c", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(service: Service, stream: bool) -> None:
    """B013."""
    service.say("é!")
    prompt = "\n\n2) A\u00e9"
    reply = await service.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=5, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in events_of(reply.text)[0]]
        text = "".join(choice["text"] for choice in choices)
        shown = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        arrays = {name: list(chain(*(part[name] for part in shown))) for name in shown[0]}
    else:
        text, arrays = reply.json()["choices"][0]["text"], reply.json()["choices"][0]["logprobs"]
    assert text == prompt + "é!"
    visible = [token for token in arrays["tokens"] if token != "<end>"]
    assert "".join(visible) == text
    assert len({len(values) for values in arrays.values()}) == 1
    offset = 0
    for token, start in zip(arrays["tokens"], arrays["text_offset"], strict=True):
        assert start == offset
        offset += len(token)


@pytest.mark.parametrize("echo", [False, True])
async def test_prompts_times_answers_are_the_same_streamed_and_whole(service: Service, echo: bool) -> None:
    body = {"prompt": ["ab", "cde"], "n": 3, "echo": echo, "logprobs": 1, "return_token_ids": True, "user": "me"}
    whole = (await service.complete(**body)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 5, "a prompt counts once"
    events, done = events_of((await service.complete(**body, stream=True)).text)
    assert done
    for choice in whole["choices"]:
        parts = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert choice["text"].startswith(("ab" if choice["index"] < 3 else "cde") if echo else "hello")
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in parts for one in part["logprobs"][key]] == choice["logprobs"][key]
        assert [one for part in parts for one in part["token_ids"]] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"


async def test_completion_logprobs_and_ids(service: Service) -> None:
    service.say("ab", end=False)
    answer = (await service.complete(max_tokens=2, logprobs=2, return_token_ids=True, prompt_logprobs=1)).json()
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2]
    assert choice["prompt_token_ids"] == service.tokenizer.encode("ab")
    assert choice["token_ids"] == service.tokenizer.encode("ab")
    assert choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1]
    as_ids = (await service.complete(max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)).json()
    token_id = service.tokenizer.encode("a")[0]
    assert as_ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token_id}"]


async def test_stop_reason(service: Service) -> None:
    service.say("one two three")
    answer = (await service.complete(max_tokens=20, stop=["two"])).json()
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["stop_reason"] == "two"
    token_id = service.tokenizer.encode("t")[0]
    answer = (await service.complete(max_tokens=20, stop_token_ids=[token_id])).json()
    assert answer["choices"][0]["stop_reason"] == token_id


async def test_chat(service: Service) -> None:
    service.say("hi you")
    answer = (await service.chat()).json()
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hi you", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert service.core.added[0].prompt_token_ids == service.tokenizer.encode("<user>Hi<assistant>")
    assert service.core.added[0].sampling.max_tokens == MAX_LEN - answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
async def test_chat_logprobs(service: Service, top: int | None) -> None:
    """B023."""
    service.say("a😀", end=False)
    body: dict[str, Any] = {} if top is None else {"top_logprobs": top}
    answer = (await service.chat(logprobs=True, max_tokens=5, **body)).json()
    choice = answer["choices"][0]
    items = choice["logprobs"]["content"]
    assert len(items) == answer["usage"]["completion_tokens"] == 5
    assert {len(item["top_logprobs"]) for item in items} == {top or 0}
    assert b"".join(bytes(item["bytes"]) for item in items).decode() == choice["message"]["content"] == "a😀"
    for item in items:
        values = [best["logprob"] for best in item["top_logprobs"]]
        assert values == sorted(values, reverse=True)


async def test_continue_final_message(service: Service) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure,"}]
    reply = await service.chat(messages=messages, continue_final_message=True)
    assert reply.status_code == 200, reply.text
    assert service.core.added[-1].prompt_token_ids == service.tokenizer.encode("<user>q<assistant>Sure,")


async def test_template_variables(service: Service) -> None:
    assert (await service.chat(chat_template_kwargs={"mood": "!"})).status_code == 200
    assert service.core.added[-1].prompt_token_ids == service.tokenizer.encode("<user>Hi<assistant>!")
    for reserved in ({"chat_template": "x"}, {"tokenize": True}, {"messages": []}):
        assert (await service.chat(chat_template_kwargs=reserved)).status_code == 400


async def test_ids_are_echoed(service: Service) -> None:
    reply = await service.complete(request_id="probe-1")
    assert reply.json()["id"] == "cmpl-probe-1"
    assert reply.headers["x-request-id"] == "probe-1"
    headers = {"X-Request-Id": "mine"}
    reply = await service.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert reply.json()["id"] == "cmpl-mine"
    assert reply.headers["x-request-id"] == "mine"
    assert (await service.complete()).headers["x-request-id"]
    both = [await service.complete(request_id="same"), await service.complete(request_id="same")]
    assert [reply.status_code for reply in both] == [200, 200]


async def test_models(service: Service) -> None:
    data = (await service.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["max_model_len"], card["parent"]) for card in data] == [(MODEL, MAX_LEN, None)]
    assert (await service.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await service.http.get("/v1/models/none")).status_code == 404


async def test_tokenize_round_trip(service: Service) -> None:
    """B080."""
    text = "日本語 😀 ok  two\n\ttab"
    answer = (await service.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]) == text
    back = (await service.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    counted = (await service.http.post("/tokenize", json=chat)).json()["count"]
    assert counted == (await service.chat(max_tokens=1)).json()["usage"]["prompt_tokens"]
    ended = (await service.http.post("/detokenize", json={"tokens": [EOS]})).json()
    assert ended == {"prompt": "<end>"}


async def test_model_defaults_give_way_to_the_request(service: Service) -> None:
    service.llm.input.defaults.update(temperature=0.25, top_p=0.5)
    await service.complete()
    assert (service.core.added[-1].sampling.temperature, service.core.added[-1].sampling.top_p) == (0.25, 0.5)
    await service.complete(temperature=0)
    assert (service.core.added[-1].sampling.temperature, service.core.added[-1].sampling.top_p) == (0, 0.5)
