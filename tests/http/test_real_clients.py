"""Structured outputs and tools with the ``openai`` client against the real server and model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.http.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MESSAGES: Any = [{"role": "user", "content": "What is 2 plus 3?"}]


def tool(name: str) -> Any:
    properties = {"a": {"type": "integer", "minimum": 0, "maximum": 99}}
    parameters = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# The context of the shared server is short.
TOOLS = [tool("sub")]


class Answer(BaseModel):
    """What the model has to fill in."""

    value: int = Field(ge=0, le=999)
    colour: Literal["red", "blue"]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0) as made:
        yield made


def test_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="smol", messages=MESSAGES, response_format=Answer, max_tokens=60, temperature=0
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Answer)


def test_required_calls_streamed_and_whole(client: openai.OpenAI) -> None:
    """B074, B076."""
    fields: Any = {"model": "smol", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    fields |= {"parallel_tool_calls": False, "max_tokens": 40}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert set(json.loads(call.function.arguments)) == {"a"}
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    (again,) = final.message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    assert final.finish_reason == "tool_calls"


def test_a_named_call(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smol",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "sub"}},
        temperature=0,
        max_tokens=40,
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.function.name == "sub"
    assert set(json.loads(call.function.arguments)) == {"a"}


def test_a_bad_schema_does_not_hurt(client: openai.OpenAI) -> None:
    """B064."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError, match="ref"):
        client.chat.completions.create(model="smol", messages=MESSAGES, response_format=schema)  # type: ignore[call-overload]
    test_parse(client)
