"""Schemas at the edge: enforced as asked, or refused with the keyword named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection
from headrace.frontend.json_schema import clean_schema, inline_root

MOST = LimitsSection()
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v", "next"],
}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, tuple[Any, str]] = {
    "self reference": ({"$ref": "#"}, r"\$ref"),
    "circle": ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, r"\$ref"),
    "circle through allOf": ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "itself"),
    "requires itself": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "itself"),
    "items require themselves": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "itself"),
    "missing": ({"$ref": "#/$defs/missing"}, r"\$ref"),
    "remote": ({"$ref": "http://127.0.0.1:9/x"}, r"\$ref"),
    "unused remote": ({"type": "integer", "$defs": {"a": {"$ref": "file:///etc/passwd"}}}, r"\$ref"),
    "not": ({"not": {"type": "integer"}}, "not supported: not"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "if": ({"if": {}, "then": {}}, "not supported: if"),
    "nullable": ({"type": "string", "nullable": True}, "nullable"),
    "a word of our own": ({"type": "string", "madeUp": 1}, "madeUp"),
    "switches of the library": ({"type": "integer", "x-guidance": {"lenient": True}}, "x-guidance"),
    "too deep": (deep(MOST.max_schema_depth + 1), "deep"),
    "too deep for Python": (deep(3000), "deep"),
    "too large": ({"enum": ["x" * MOST.max_schema_bytes]}, "bytes"),
    "no schema": ({"properties": {"a": 5}}, "object or a boolean"),
    "no map": ({"properties": [1]}, "properties"),
    "no list": ({"anyOf": {}}, "anyOf"),
}


@pytest.mark.parametrize("form", ["password", "binary", "path"])
def test_formats_that_demand_nothing_are_left_out(form: str) -> None:
    assert clean_schema({"type": "string", "format": form}, "x", MOST) == {"type": "string"}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name: str) -> None:
    """B064, B071."""
    schema, word = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=word) as caught:
        clean_schema(schema, "the_field", MOST)
    assert caught.value.param == "the_field"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]},
        {"type": ["string", "null"], "title": "a", "description": "b", "default": None, "x-note": 1, "minLength": 2},
        {"type": "object", "required": ["absent"]},
    ],
)
def test_taken(schema: Any) -> None:
    clean_schema(schema, "x", MOST)


def test_what_demands_nothing_is_taken_out_and_the_rest_is_kept() -> None:
    schema = {"type": "array", "uniqueItems": False, "x-order": 1, "items": {"enum": [{"not": 1}], "nullable": False}}
    assert clean_schema(schema, "x", MOST) == {"type": "array", "items": {"enum": [{"not": 1}]}}


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "integer"}, "$ref": {"type": "string"}}}
    assert clean_schema(schema, "x", MOST) == schema


def test_many_references_do_not_take_long() -> None:
    schema: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": {}}
    for i in range(400):
        schema["$defs"][f"d{i}"] = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["a"],
        }
    schema["$defs"]["d400"] = {"type": "integer"}
    assert json.dumps(clean_schema(schema, "x", MOST)) == json.dumps(schema)


def test_references_of_a_part_follow_it() -> None:
    part = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}}
    moved = inline_root(part, "#/$defs/tool0")
    assert moved["properties"] == {"a": {"$ref": "#/$defs/tool0"}, "b": {"$ref": "#/$defs/tool0/$defs/x"}}
