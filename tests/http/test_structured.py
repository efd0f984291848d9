"""Structured outputs over HTTP: what reaches the core, and what is refused before any token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from headrace.messages.runner_output import GRAMMAR_TOO_COSTLY, NO_TOKEN_LEFT
from headrace.messages.sampling_params import StructuredOutputParams
from tests.http.conftest import StartService
from tests.http.test_refusals import BODIES, CHAT, COMPLETION, refused
from tests.http_service import Service

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": as_format(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
        ({"response_format": as_format(True)}, {"json": "true"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "é"]}}, {"choice": ("a", "é")}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ],
)
async def test_what_reaches_the_core(
    service: Service, path: str, fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    reply = await service.http.post(path, json={**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    wanted = None if expected is None else StructuredOutputParams(**expected)
    assert service.core.added[-1].sampling.structured_outputs == wanted


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": 5}, "response_format.type", "json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "known"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
         "response_format.json_schema.x", "known"),
        ({"response_format": as_format([])}, "response_format.json_schema.schema", "object"),
        ({"response_format": as_format({"$ref": "#"})}, "response_format.json_schema.schema", "$ref"),
        ({"response_format": as_format({"$ref": "#/$defs/missing"})}, "response_format.json_schema.schema", "$ref"),
        ({"response_format": as_format({"not": {}})}, "response_format.json_schema.schema", "not supported: not"),
        ({"response_format": as_format({"type": "string", "pattern": "(?=a)b"})}, "response_format.json_schema.schema",
         "look-around"),
        ({"response_format": as_format({"type": "integer", "minimum": 9, "maximum": 3})},
         "response_format.json_schema.schema", "minimum"),
        ({"structured_outputs": 5}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "text"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "regular expression"),
        ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex", "longer"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "texts"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "object"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag", "triggers"),
        ({"structured_outputs": {"made_up": 1}}, "structured_outputs.made_up", "known"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs",
         "both"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [70, 71]}, "allowed_token_ids", "every token"),
    ],
)  # fmt: skip
async def test_refused_before_any_token(
    service: Service, path: str, stream: bool, fields: dict[str, Any], param: str, word: str
) -> None:
    """B056, B064, B065, B068."""
    error = await refused(service, path, {**BODIES[path], **fields, "stream": stream})
    assert error["param"] == param
    assert word in error["message"]
    assert service.core.added == []


@pytest.mark.parametrize("reason", [NO_TOKEN_LEFT, f"structured_outputs: {GRAMMAR_TOO_COSTLY}: more than 9 states"])
async def test_a_request_whose_masks_leave_nothing_is_its_own_fault(start_service: StartService, reason: str) -> None:
    """B056."""
    service = await start_service(auto=False)
    asking = asyncio.create_task(service.complete())
    while not service.core.added:
        await asyncio.sleep(0)
    end = EngineCoreOutput(
        request_id=service.core.added[0].request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=reason,
    )
    service.core.send(EngineCoreOutputs(outputs=[end]))
    reply = await asking
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == reason


@pytest.mark.parametrize("levels", [60, 400, 900, 1100, 5000])
@pytest.mark.parametrize("where", ["response_format", "structured_outputs", "tools"])
async def test_nesting_without_end(service: Service, where: str, levels: int) -> None:
    """B064."""
    schema = '{"type": "array", "items": ' * levels + "{}" + "}" * levels
    value = {
        "response_format": f'{{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
        "structured_outputs": f'{{"json": {json.dumps(schema)}}}',
        "tools": '[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": '
        + schema
        + "}}}}]",
    }[where]
    body = json.dumps(BODIES[CHAT])[:-1] + f', "{where}": {value}}}'
    await refused(service, CHAT, body.encode())


NESTED_FIELDS = [
    (CHAT, "tools", '[{{"function": {{"name": "f", "parameters": {{"properties": {{"a": {}}}}}}}}}]'),
    (CHAT, "metadata", '{{"a": {}}}'),
    (CHAT, "chat_template_kwargs", '{{"mood": {}}}'),
    (CHAT, "messages", '[{{"role": "user", "content": [{}]}}]'),
    (CHAT, "messages", '[{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {}}}}}]}}]'),
    (CHAT, "response_format", '{{"type": "structural_tag", "triggers": {}, "structures": []}}'),
    (COMPLETION, "structured_outputs", '{{"structural_tag": {{"structures": [{}], "otherwise": {{}}}}}}'),
    (COMPLETION, "user", "{}"),
    ("/v1/responses", "tools", '[{{"type": "function", "name": "f", "parameters": {}}}]'),
    ("/v1/responses", "input", '[{{"role": "user", "content": [{}]}}]'),
    ("/v1/responses", "text", '{{"format": {}}}'),
    ("/inference/v1/generate", "features", '{{"a": {}}}'),
]


@pytest.mark.parametrize(("path", "field", "around"), NESTED_FIELDS, ids=lambda value: str(value)[:24])
async def test_nesting_that_can_just_be_read(service: Service, path: str, field: str, around: str) -> None:
    """Bodies as deep as Python is: what comes after reading them finds less room."""
    base = {**BODIES, "/v1/responses": {"input": "x"}, "/inference/v1/generate": {"token_ids": [1]}}[path]
    rest = json.dumps({name: value for name, value in base.items() if name != field})[:-1]
    for levels in (20, 500, *range(925, 1000, 5)):
        for begin, end in (('{"items": ', "}"), ("[", "]")):
            value = around.format(begin * levels + "{}" + end * levels)
            reply = await service.http.post(path, content=f'{rest}, "{field}": {value}}}')
            assert reply.status_code in (200, 400), (levels, reply.status_code, reply.text[:200])
