"""Structured text and enforced calls of ``/v1/responses`` over a real core, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.http_service import MODEL
from tests.simulated_service import SimulatedService, start_simulated


class Choice(BaseModel):
    """Short whatever is sampled."""

    colour: Literal["red", "blue"]


TOOL: Any = {
    "type": "function",
    "name": "pick",
    "description": "Picks.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@pytest.fixture
async def service() -> AsyncIterator[SimulatedService]:
    running = await start_simulated({"max_model_len": 2048, "num_kv_blocks": 1000})
    yield running
    await running.settles()
    await running.end()


async def test_parsed_text(service: SimulatedService) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.parse(model=MODEL, input="Hi", text_format=Choice, max_output_tokens=200)
        assert isinstance(answer.output_parsed, Choice)


async def test_a_named_call(service: SimulatedService) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": [TOOL], "max_output_tokens": 300, "seed": 1}
    body["tool_choice"] = {"type": "function", "name": "pick"}
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        fields = {name: value for name, value in body.items() if name != "seed"}
        whole = await client.responses.create(**fields, extra_body={"seed": 1})
        async with client.responses.stream(**fields, extra_body={"seed": 1}) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
    for answer in (whole, final):
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert call.name == "pick"
        assert json.loads(call.arguments)["colour"] in ("red", "blue")
    assert [item.type for item in whole.output] == [item.type for item in final.output]
