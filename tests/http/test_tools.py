"""Tools and reasoning over HTTP: the same answer streamed and not, for every way in which the text arrives."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from headrace.frontend.parsers.registry import TOOL_FORMATS
from headrace.testing.engine_config import make_architecture
from tests.http.conftest import StartService
from tests.http.test_refusals import BODIES, CHAT, refused
from tests.http_service import Service, events_of


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token per byte the description of tools needs a longer context than other tests."""
    monkeypatch.setattr("tests.http_service.MAX_LEN", 4096)
    monkeypatch.setattr("tests.http_service.make_architecture", partial(make_architecture, max_position=4096))


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


ADD = tool("add", type="object", properties={"a": {"type": "integer"}}, required=["a"])
TOOLS = [ADD, tool("sub")]
TWO = (
    'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"arguments": {"é": "}"}, "name": "sub"}</tool_call>'
)
NAMED = {"type": "function", "function": {"name": "add"}}


async def whole(service: Service, **body: Any) -> dict[str, Any]:
    reply = await service.chat(max_tokens=160, **body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def streamed(service: Service, **body: Any) -> dict[str, Any]:
    """A stream put together again as a client does; its rules are checked on the way."""
    reply = await service.chat(max_tokens=160, stream=True, stream_options={"include_usage": True}, **body)
    assert reply.status_code == 200, reply.text
    events, done = events_of(reply.text)
    assert done and all("error" not in event for event in events)
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["id"] and call["type"] == "function"
                message["calls"].append([call["function"]["name"], ""])
            else:
                assert call["index"] == len(message["calls"]) - 1
                assert not {"id", "type"} & set(call) and "name" not in call["function"]
            message["calls"][-1][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert "finish" not in message
            message["finish"] = choice["finish_reason"]
    message["usage"] = events[-1]["usage"]
    return message


async def both(service: Service, **body: Any) -> dict[str, Any]:
    """The answer, after checking that it is the same streamed and not."""
    stream = await streamed(service, **body)
    answer = await whole(service, **body)
    choice, message = answer["choices"][0], answer["choices"][0]["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    ids = [c["id"] for c in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert stream["content"] == (message["content"] or "")
    assert stream["reasoning"] == message.get("reasoning", "") == message.get("reasoning_content", "")
    assert stream["calls"] == calls
    assert stream["finish"] == choice["finish_reason"]
    drop = "prompt_tokens_details"
    assert {**stream["usage"], drop: 0} == {**answer["usage"], drop: 0}
    return stream


async def test_calls_that_the_model_decides_on(service: Service) -> None:
    """B074."""
    service.say(TWO)
    got = await both(service, tools=TOOLS)
    assert got["calls"] == [["add", '{"a": 1}'], ["sub", '{"é": "}"}']]
    assert (got["content"], got["finish"]) == ("Sure.", "tool_calls")


async def test_one_call_at_a_time(service: Service) -> None:
    service.say(TWO)
    got = await both(service, tools=TOOLS, parallel_tool_calls=False)
    assert got["calls"] == [["add", '{"a": 1}']]


async def test_none_is_plain_text_and_shows_the_model_no_tools(service: Service) -> None:
    """B077."""
    service.say("<tool_call>")
    got = await both(service, tools=TOOLS, tool_choice="none")
    assert (got["calls"], got["content"], got["finish"]) == ([], "<tool_call>", "stop")
    assert "add" not in service.tokenizer.decode(service.core.added[-1].prompt_token_ids)


async def test_text_without_calls_is_text(service: Service) -> None:
    service.say("a < b <tool \n")
    got = await both(service, tools=TOOLS)
    assert (got["content"], got["finish"]) == ("a < b <tool \n", "stop")


async def test_required_calls_are_enforced(service: Service) -> None:
    service.say('[{"name": "sub", "arguments": {}}, {"name": "add", "arguments": {"a": 3}}]')
    got = await both(service, tools=TOOLS, tool_choice="required")
    assert got["calls"] == [["sub", "{}"], ["add", '{"a": 3}']]
    assert (got["content"], got["finish"]) == ("", "tool_calls")
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and constraint.json is not None
    schema = json.loads(constraint.json)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["add", "sub"]
    assert schema["$defs"]["tool0"]["required"] == ["a"]


async def test_a_named_call_is_enforced(service: Service) -> None:
    service.say('{"a": 3}')
    got = await both(service, tools=TOOLS, tool_choice=NAMED)
    assert got["calls"] == [["add", '{"a": 3}']]
    assert (got["content"], got["finish"]) == ("", "stop")
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and json.loads(constraint.json or "") == ADD["function"]["parameters"]


async def test_the_arguments_of_strict_functions_are_enforced(service: Service) -> None:
    service.say('Yes. <tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>')
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    got = await both(service, tools=[strict, tool("sub")])
    assert (got["content"], got["calls"]) == ("Yes.", [["add", '{"a": 3}']])
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and constraint.structural_tag is not None
    tag = json.loads(constraint.structural_tag)
    assert tag["triggers"] == ["<tool_call>"]
    assert [one["schema"].get("required") for one in tag["structures"]] == [["a"], None]
    await both(service, tools=TOOLS)
    assert service.core.added[-1].sampling.structured_outputs is None, "nobody asked for that"


SPELT = {
    "hermes": TWO,
    "qwen3": "Sure.\n<tool_call><function=add><parameter=a>1</parameter></function></tool_call>\n"
    '<tool_call>{"arguments": {"é": "}"}, "name": "sub"}</tool_call>',
    "llama3_json": ' {"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {"é": "}"}}',
    "mistral": 'Sure.[TOOL_CALLS]add{"a": 1}[TOOL_CALLS][{"name": "sub", "arguments": {"é": "}"}}]',
    "pythonic": '[add(a=1), sub(é="}")]',
}
"""The same two calls as each format has them."""
CALLS = [["add", '{"a": 1}'], ["sub", '{"é": "}"}']]
FORCED = '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {"é": "}"}}]'


def test_every_format_is_tried() -> None:
    assert set(SPELT) == set(TOOL_FORMATS.names())


@pytest.mark.parametrize("form", list(SPELT))
async def test_every_format_under_every_choice_streamed_and_not(start_service: StartService, form: str) -> None:
    """B074, B077."""
    service = await start_service(settings={"tool_call_parser": form})
    service.say(SPELT[form])
    content = "Sure." if SPELT[form].startswith("Sure.") else ""
    for choice in ("auto", None):
        got = await both(service, tools=TOOLS, tool_choice=choice)
        assert (got["calls"], got["content"], got["finish"]) == (CALLS, content, "tool_calls")
    one = await both(service, tools=TOOLS, parallel_tool_calls=False)
    assert one["calls"] == CALLS[:1]
    none = await both(service, tools=TOOLS, tool_choice="none")
    assert (none["calls"], none["content"], none["finish"]) == ([], SPELT[form], "stop")
    service.say(FORCED)
    assert (await both(service, tools=TOOLS, tool_choice="required"))["calls"] == CALLS
    service.say('{"a": 3}')
    named = await both(service, tools=TOOLS, tool_choice=NAMED)
    assert (named["calls"], named["finish"]) == ([["add", '{"a": 3}']], "stop")
    strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]
    service.say(SPELT[form])
    assert (await both(service, tools=strict))["calls"] == CALLS
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and constraint.structural_tag is not None


@pytest.mark.parametrize("form", sorted(SPELT.keys() - {"llama3_json"}))
async def test_calls_or_json(start_service: StartService, form: str) -> None:
    service = await start_service(settings={"tool_call_parser": form})
    schema = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": False}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    service.say('{"b": null}')
    got = await both(service, tools=TOOLS, **asked)
    assert (got["calls"], got["content"], got["finish"]) == ([], '{"b": null}', "stop")
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and json.loads(constraint.structural_tag or "")["otherwise"] == schema
    service.say(SPELT[form].removeprefix("Sure.").lstrip())
    got = await both(service, tools=TOOLS, response_format={"type": "json_object"})
    assert (got["calls"], got["content"], got["finish"]) == (CALLS, "", "tool_calls")
    service.say(FORCED)
    assert (await both(service, tools=TOOLS, tool_choice="required", **asked))["calls"] == CALLS


async def test_calls_that_look_like_json_cannot_be_told_from_it(start_service: StartService) -> None:
    service = await start_service(settings={"tool_call_parser": "llama3_json"})
    body = {**BODIES[CHAT], "tools": TOOLS, "response_format": {"type": "json_object"}}
    assert (await refused(service, CHAT, body))["param"] == "response_format"


@pytest.mark.parametrize("length", [0, 5, 12, 20, 30, 40])
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
async def test_a_call_that_is_cut_ends_in_good_order(service: Service, choice: Any, length: int) -> None:
    """B076."""
    text = {"required": '[{"name": "add", "arguments": {"a": 12345}}]', "auto": TWO}.get(str(choice), '{"a": 12345}')
    service.say(text[:length] or "[", end=False)
    await both(service, tools=TOOLS, tool_choice=choice)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_functions_that_are_shown_but_not_allowed(service: Service) -> None:
    service.say(TWO)
    got = await both(service, tools=TOOLS, tool_choice=allowed("auto", "add"))
    assert got["calls"] == CALLS[:1]
    assert "<tool_call>" in got["content"], "what may not be called is text"
    prompt = service.tokenizer.decode(service.core.added[-1].prompt_token_ids)
    assert '"name": "add"' in prompt and '"name": "sub"' in prompt
    service.say('[{"name": "sub", "arguments": {}}]')
    assert (await both(service, tools=TOOLS, tool_choice=allowed("required", "sub")))["calls"] == [["sub", "{}"]]
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and '"add"' not in (constraint.json or "")
    for choice in (allowed("none", "add"), allowed("auto"), allowed("auto", "nope"), {"type": "allowed_tools"}):
        error = await refused(service, CHAT, {**BODIES[CHAT], "tools": TOOLS, "tool_choice": choice})
        assert error["param"].startswith("tool_choice")


ODD = tool("odd", type="object", properties={"a": {"$ref": "#/x"}}, uniqueItems=True)
STRICT_ODD = {"type": "function", "function": {**ODD["function"], "strict": True}}


@pytest.mark.parametrize("form", sorted(SPELT))
async def test_schemas_that_nothing_has_to_hold_to_may_say_anything(start_service: StartService, form: str) -> None:
    service = await start_service(settings={"tool_call_parser": form})
    service.say(SPELT[form])
    for parameters in ({"properties": []}, {"properties": {"a": 5}}, {"required": 5}, ODD["function"]["parameters"]):
        got = await both(service, tools=[*TOOLS, tool("odd", **parameters)])
        assert got["calls"] == CALLS
        strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]
        reply = await service.chat(tools=[*strict, tool("odd", **parameters)], max_tokens=160)
        assert reply.status_code == (400 if form == "pythonic" else 200), reply.text
    await both(service, tools=[*TOOLS, ODD], tool_choice="none")
    service.say('{"a": 3}')
    assert (await both(service, tools=[*TOOLS, ODD], tool_choice=NAMED))["calls"] == [["add", '{"a": 3}']]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "foo"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [tool("add"), tool("add")]}, "tools[1].function.name"),
        ({"tools": [tool("has spaces")]}, "tools[0].function.name"),
        ({"tools": [tool("add", type="string")]}, "tools[0].function.parameters"),
        ({"tools": [tool("add"), ODD], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": [STRICT_ODD]}, "tools[0].function.parameters"),
        ({"tools": [tool(f"t{i}") for i in range(200)]}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"tools": TOOLS, "response_format": {"type": "nope"}}, "response_format.type"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
async def test_contradictions_are_refused_before_any_byte(
    service: Service, stream: bool, fields: dict[str, Any], param: str
) -> None:
    """B064, B077."""
    error = await refused(service, CHAT, {**BODIES[CHAT], **fields, "stream": stream})
    assert error["param"] == param
    assert service.core.added == []


async def test_tools_are_told_of_where_the_template_has_no_place_for_them(service: Service) -> None:
    service.say("ok")
    await whole(service, tools=[ADD])
    prompt = service.tokenizer.decode(service.core.added[-1].prompt_token_ids)
    assert prompt.startswith("<system>") and '"name": "add"' in prompt and prompt.endswith("<user>Hi<assistant>")
    count = await service.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}], "tools": [ADD]})
    assert count.json()["count"] == len(service.core.added[-1].prompt_token_ids)


async def test_auto_can_be_switched_off(start_service: StartService) -> None:
    service = await start_service(settings={"enable_auto_tool_choice": False})
    error = await refused(service, CHAT, {**BODIES[CHAT], "tools": TOOLS})
    assert error["param"] == "tool_choice"
    service.say("text")
    assert (await both(service, tools=TOOLS, tool_choice="none"))["content"] == "text"


THINKING = "<think>\nfirst this\n</think>\n\nThe answer."


async def test_reasoning_is_told_apart_and_counted(start_service: StartService) -> None:
    """B079."""
    service = await start_service(settings={"reasoning_parser": "qwen3"})
    service.say(THINKING)
    got = await both(service)
    assert (got["reasoning"], got["content"]) == ("first this", "The answer.")
    details = got["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("<think>\nfirst this\n</think>")}
    service.say("No thoughts </thi")
    got = await both(service)
    assert (got["reasoning"], got["content"]) == ("", "No thoughts </thi")
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_that_nobody_wants_is_left_out_but_counted(start_service: StartService) -> None:
    service = await start_service(settings={"reasoning_parser": "deepseek_r1"})
    service.say("so and so</think>Yes.")
    got = await both(service, include_reasoning=False)
    assert (got["reasoning"], got["content"]) == ("", "Yes.")
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("so and so</think>")}


async def test_reasoning_and_then_calls(start_service: StartService) -> None:
    service = await start_service(settings={"reasoning_parser": "qwen3"})
    service.say("<think><tool_call></think>" + TWO)
    got = await both(service, tools=TOOLS)
    assert (got["reasoning"], got["content"]) == ("<tool_call>", "Sure.")
    assert [name for name, _ in got["calls"]] == ["add", "sub"]


async def test_a_constraint_begins_after_the_reasoning(start_service: StartService) -> None:
    service = await start_service(settings={"reasoning_parser": "qwen3"})
    service.say("<think>so</think>{}")
    got = await both(service, response_format={"type": "json_object"})
    assert (got["reasoning"], got["content"]) == ("so", "{}")
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and constraint.reasoning is not None
    assert (constraint.reasoning.end, constraint.reasoning.open) == ("</think>", False)
    completion = await service.complete(response_format={"type": "json_object"})
    assert completion.status_code == 200
    constraint = service.core.added[-1].sampling.structured_outputs
    assert constraint is not None and constraint.reasoning is None


async def test_logprobs_and_ids_of_held_text_are_not_lost(service: Service) -> None:
    service.say(TWO)
    reply = await service.chat(
        max_tokens=160, stream=True, tools=TOOLS, logprobs=True, return_token_ids=True, temperature=0
    )
    events, done = events_of(reply.text)
    assert done
    choices = [choice for event in events for choice in event["choices"]]
    ids = [i for choice in choices for i in choice.get("token_ids") or ()]
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert service.tokenizer.decode(ids) == TWO
    assert len(entries) == len(ids)
