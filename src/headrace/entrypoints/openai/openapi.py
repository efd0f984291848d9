"""The OpenAPI page, from what validates: the structs that parse bodies, the ranges of sampling, the refusals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

import headrace
from headrace.entrypoints.openai.power import LEVELS, MODES, TAGS
from headrace.entrypoints.openai.protocol import REQUEST_BODIES
from headrace.entrypoints.openai.refusals import REFUSALS
from headrace.messages.sampling_params import RANGES, Range

_IN_PATH = re.compile(r"\{(\w+)(?::path)?\}")
_QUERIES: dict[str, list[dict[str, Any]]] = {
    "/v1/requests/{request_id}/explain": [{"name": "format", "schema": {"enum": ["json", "text"]}}],
    "/v1/responses/{response_id}/input_items": [
        {"name": "limit", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
        {"name": "order", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "schema": {"type": "string"}},
    ],
    "/sleep": [
        {"name": "level", "schema": {"enum": [int(level) for level in LEVELS]}},
        {"name": "mode", "schema": {"enum": list(MODES)}},
    ],
    "/wake_up": [{"name": "tags", "schema": {"type": "array", "items": {"enum": list(TAGS)}}}],
    "/v1/steps": [{"name": "after", "schema": {"type": "string", "pattern": "^[0-9]+$"}}],
}
_STREAMED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"})
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def make_document(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The page of routes given as ``(method, path)``."""
    _, schemas = msgspec.json.schema_components(REQUEST_BODIES.values(), ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        _add_rules(schema.get("properties", {}))
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        paths.setdefault(path.replace(":path", ""), {})[method.lower()] = _operation(path)
    info = {"title": "headrace", "version": headrace.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": {**schemas, "Error": _ERROR}}}


def _add_rules(properties: dict[str, Any]) -> None:
    """What is checked after the types: ranges, and what is refused."""
    for name, schema in properties.items():
        found = RANGES.get("logprobs" if name == "top_logprobs" else name)
        # Absent and null are told as types of their own.
        for number in schema.get("anyOf", [schema]):
            if found is not None and number.get("type") in ("number", "integer"):
                number.update({**_bounds(found), **number})
        if name in REFUSALS:
            schema["description"] = REFUSALS[name].reason


def _bounds(found: Range) -> dict[str, Any]:
    bounds: dict[str, Any] = {"exclusiveMinimum" if found.open_low else "minimum": found.low}
    return bounds if found.high is None else {**bounds, "maximum": found.high}


def _operation(path: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    good: dict[str, Any] = {"description": "OK"}
    if path in _STREAMED:
        good["content"] = {"application/json": {}, "text/event-stream": {}}
    refused = {"description": "Refused", "content": error}
    operation: dict[str, Any] = {"responses": {"200": good, "4XX": refused, "5XX": refused}}
    if kind := REQUEST_BODIES.get(path):
        operation["summary"] = (kind.__doc__ or "").strip().splitlines()[0]
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    text = {"type": "string", "minLength": 1}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in _IN_PATH.findall(path)]
    parameters += [{"in": "query", "required": False, **query} for query in _QUERIES.get(path, ())]
    if parameters:
        operation["parameters"] = parameters
    return operation
