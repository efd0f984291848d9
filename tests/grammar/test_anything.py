"""Whatever a client writes where a schema, a tool or a constraint is expected: taken, or refused as its own fault."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection
from headrace.core.grammar_backend import GrammarError, compile_grammar
from headrace.entrypoints.openai.constraints import read_constraint
from headrace.entrypoints.openai.protocol import ChatRequest
from headrace.frontend.json_schema import clean_schema
from headrace.frontend.parsers.spelling import tag_hermes
from headrace.frontend.tools import plan_tools
from headrace.messages.sampling_params import StructuredOutputParams
from tests.grammar.test_backend import TOKENIZER

pytestmark = pytest.mark.slow

WORDS = [
    "",
    "a",
    "object",
    "array",
    "string",
    "integer",
    "number",
    "null",
    "#",
    "#/$defs/a",
    "#/properties/a",
    "^a+$",
    "(",
]
LEAVES = st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats(allow_nan=False) | st.sampled_from(WORDS)
KEYS = st.sampled_from(
    [
        *["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "patternProperties", "items"],
        *["additionalProperties", "required", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "not"],
        *["pattern", "format", "minimum", "maximum", "multipleOf", "$defs", "a", "b", "title"],
    ]
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=14
)
PARTS = st.sampled_from(
    ["a", "\\", "(", ")", "[", "]", "{2,5}", "*", "+", "?", "|", ".", "^", "$", "/", "\n", "é", "\\d"]
)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_schemas(schema: Any) -> None:
    try:
        cleaned = clean_schema(schema, "x", LimitsSection())
        compile_grammar(StructuredOutputParams(json=json.dumps(cleaned)), TOKENIZER)
    except (InvalidRequestError, GrammarError) as error:
        assert str(error)


@given(st.lists(PARTS, max_size=8).map("".join), st.sampled_from(["regex", "grammar", "structural_tag"]))
@settings(max_examples=200, deadline=None)
def test_texts(text: str, kind: str) -> None:
    try:
        compile_grammar(StructuredOutputParams(**{kind: text}), TOKENIZER)  # type: ignore[arg-type]
    except (InvalidRequestError, GrammarError) as error:
        assert str(error)


@given(JSON, JSON)
@settings(max_examples=200, deadline=None)
def test_tools(shape: Any, choice: Any) -> None:
    named = {"type": "function", "function": {"name": "f", "parameters": shape}}
    for tools in (shape, [shape], [named]):
        for wanted in (choice, "required", {"type": "function", "function": choice}):
            try:
                plan_tools(tools, wanted, None, LimitsSection()).constraint(tag_hermes)
            except InvalidRequestError as error:
                assert str(error)


@given(JSON, JSON)
@settings(max_examples=200, deadline=None)
def test_constraints(response_format: Any, structured_outputs: Any) -> None:
    body = ChatRequest(messages=[], response_format=response_format, structured_outputs=structured_outputs)
    for given_body in (
        body,
        msgspec.structs.replace(body, response_format={"type": "json_schema", "json_schema": structured_outputs}),
        msgspec.structs.replace(body, response_format=None, structured_outputs={"json": response_format}),
    ):
        try:
            read_constraint(given_body)
        except InvalidRequestError as error:
            assert str(error)
