"""What a body asks the output to be: ``response_format`` and ``structured_outputs`` to one constraint."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.protocol import GenerationFields
from headrace.frontend.tools import MakeTag, ToolPlan
from headrace.messages.sampling_params import StructuredOutputParams

_TEXTS = frozenset({"regex", "grammar"})
_KINDS = frozenset({"json", "json_object", "regex", "choice", "grammar", "structural_tag"})
_FORMAT_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "triggers", "structures", "at_start", "otherwise"},
}
_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


class Constraint(NamedTuple):
    """A constraint, and the field that asked for it."""

    params: StructuredOutputParams
    param: str


def read_constraint(body: GenerationFields) -> Constraint | None:
    """Return the constraint of a body, if it has one.

    Raises:
        InvalidRequestError: a wrong shape, an unknown kind, or several constraints.
    """
    by_format = _read_format(body.response_format)
    by_field = _read_field(body.structured_outputs)
    if by_format is not None and by_field is not None:
        message = "response_format and structured_outputs must not both be given"
        raise InvalidRequestError(message, param="structured_outputs")
    return by_format or by_field


def read_chat_constraint(body: GenerationFields, plan: ToolPlan, make_tag: MakeTag) -> Constraint | None:
    """The same for a chat, where required, named and strict tool calls are a constraint too.

    Where the model decides, its answer is calls or what the body asks for; where there must be calls, there is no text
    that could be something else.
    """
    asked = read_constraint(body)
    if asked is not None and plan.mode == "auto":
        return _calls_or(asked, make_tag(plan.tools))
    by_tools = plan.constraint(make_tag)
    return asked if by_tools is None else Constraint(by_tools, "tools")


def _calls_or(asked: Constraint, tag: dict[str, Any]) -> Constraint:
    """Calls, or JSON as asked for."""
    params = asked.params
    if params.json is None and not params.json_object:
        message = f"{asked.param}: only JSON can be combined with tools that may be called; use tool_choice none"
        raise InvalidRequestError(message, param=asked.param)
    if any(structure["begin"].startswith("{") for structure in tag["structures"]):
        message = f"{asked.param}: this model writes calls as plain JSON, so that JSON answers cannot be told apart"
        raise InvalidRequestError(f"{message}; use tool_choice none or required", param=asked.param)
    try:
        tag["otherwise"] = {"type": "object"} if params.json is None else json.loads(params.json)
    except (ValueError, RecursionError):
        raise _refuse(asked.param, "must be valid JSON") from None
    return Constraint(StructuredOutputParams(structural_tag=json.dumps(tag, ensure_ascii=False)), asked.param)


def _check_keys(where: str, value: dict[str, Any], known: Collection[str]) -> None:
    for key in value:
        if key not in known:
            raise _refuse(f"{where}.{key[:40]}", "is not known")


def _refuse(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {reason}", param=param)


def _read_format(value: Any) -> Constraint | None:
    name = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _FORMAT_KEYS:
        _check_keys(name, value, _FORMAT_KEYS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(StructuredOutputParams(json_object=True), name)
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise _refuse(f"{name}.json_schema", "must be an object with a schema")
        _check_keys(f"{name}.json_schema", described, _SCHEMA_KEYS)
        where = f"{name}.json_schema.schema"
        return Constraint(StructuredOutputParams(json=_as_json(where, described["schema"])), where)
    if kind == "structural_tag":
        return Constraint(StructuredOutputParams(structural_tag=_as_json(name, value)), name)
    raise _refuse(f"{name}.type", "must be text, json_object, json_schema or structural_tag")


def _read_field(value: Any) -> Constraint | None:
    name = "structured_outputs"
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise _refuse(name, "must be an object")
    _check_keys(name, value, _KINDS)
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    if len(given) != 1:
        raise _refuse(name, f"needs exactly one of {', '.join(sorted(_KINDS))}")
    ((key, item),) = given.items()
    where = f"{name}.{key}"
    if key in _TEXTS:
        if not isinstance(item, str) or not item:
            raise _refuse(where, "must be text that is not empty")
        return Constraint(_make(key, item), where)
    if key == "json_object":
        if item is not True:
            raise _refuse(where, "must be true")
        return Constraint(StructuredOutputParams(json_object=True), where)
    if key == "choice":
        if not isinstance(item, list) or not item or not all(isinstance(text, str) and text for text in item):
            raise _refuse(where, "must be a list of texts that are not empty")
        return Constraint(StructuredOutputParams(choice=tuple(item)), where)
    text = item if isinstance(item, str) else _as_json(where, item)
    return Constraint(_make(key, text), where)


def _make(kind: str, value: Any) -> StructuredOutputParams:
    return StructuredOutputParams(**{kind: value})


def _as_json(where: str, value: Any) -> str:
    if not isinstance(value, (dict, bool)):
        raise _refuse(where, "must be an object")
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise _refuse(where, "is nested too deep") from None
