"""How the calls of each format are held to their schemas where the model decides: a structural tag over all tools.

Two kinds of tag (`headrace.core.grammar_source` reads both). With ``triggers``, text is free until one of them comes,
which must lead into a call. With ``at_start``, an answer that begins as a call does is a list of calls, and any other
is free text. The parsers of this room read all that these tags allow.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.frontend.tools import Tool, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"

_ANY_ARGUMENTS = {"type": "object"}
_AS_KEYWORDS = frozenset(
    {"type", "title", "description", "properties", "required", "additionalProperties", "$defs", "definitions"}
)


def _schema(tool: Tool) -> dict[str, Any]:
    """What a call's arguments are held to."""
    return tool.parameters if tool.strict else _ANY_ARGUMENTS


def tag_hermes(tools: Tools) -> dict[str, Any]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
    structures = [
        {"begin": f'{OPEN}\n{{"name": "{name}", "arguments": ', "schema": _schema(tool), "end": f"}}\n{CLOSE}"}
        for name, tool in tools.items()
    ]
    return {"triggers": [OPEN], "structures": structures}


def tag_mistral(tools: Tools) -> dict[str, Any]:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}]`` of older models, ``[TOOL_CALLS]name{…}`` of newer ones."""
    structures = []
    for name, tool in tools.items():
        for space in ("", " "):
            begin = f'{TOOL_CALLS}{space}[{{"name": "{name}", "arguments": '
            structures.append({"begin": begin, "schema": _schema(tool), "end": "}]"})
        for mark in ("", ARGS):
            structures.append({"begin": f"{TOOL_CALLS}{name}{mark}", "schema": _schema(tool), "end": ""})
    return {"triggers": [TOOL_CALLS], "structures": structures}


def tag_llama3_json(tools: Tools) -> dict[str, Any]:
    """``{"name": …, "parameters": {…}}``, after the tag or not, several with ``;`` between."""
    structures = [
        {"begin": f'{{"name": "{name}", "parameters": ', "schema": _schema(tool), "end": "}"}
        for name, tool in tools.items()
    ]
    return {"at_start": {"lead": PYTHON_TAG, "separator": "; "}, "structures": structures}


def tag_pythonic(tools: Tools) -> dict[str, Any]:
    """``[f(a=1), g(b="x")]``; the arguments of all functions are held to their schemas.

    Raises:
        InvalidRequestError: a schema whose values cannot be written as keyword arguments.
    """
    structures = []
    for place, (name, tool) in enumerate(tools.items()):
        parts = _keywords(tool.parameters)
        if parts is None or not all(part.isidentifier() for part in name.split(".")):
            where = f"tools[{place}].function.strict"
            message = f"{where}: this model's form of calls (pythonic) cannot hold arguments to this schema"
            raise InvalidRequestError(f"{message}; use tool_choice required, or leave strict out", param=where)
        structures.append({"begin": f"{name}(", "parts": parts, "end": ")"})
    return {"at_start": {"opening": "[", "separator": ", ", "closing": "]"}, "structures": structures}


def _keywords(schema: Mapping[str, Any]) -> list[Any] | None:
    """The keyword arguments that an object's properties make, required ones first; ``None`` where that is not all."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    plain = schema.keys() <= _AS_KEYWORDS and all(isinstance(name, str) and name in properties for name in required)
    names_are_words = all(name.isidentifier() and not keyword.iskeyword(name) for name in properties)
    if not (plain and names_are_words and all(_stands_alone(ref) for ref in _references(properties))):
        return None
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    values = {name: {**one, **shared} if isinstance(one, dict) else one for name, one in properties.items()}
    parts: list[Any] = []
    for name in (name for name in properties if name in required):
        parts += [f"{', ' if parts else ''}{name}=", {"schema": values[name]}]
    has_first = bool(parts)
    for name in (name for name in properties if name not in required):
        # Where nothing is required the comma follows: Python allows one at the end.
        optional = [f"{', ' if has_first else ''}{name}=", {"schema": values[name]}]
        parts.append(optional if has_first else [*optional, ", "])
    return parts


def _references(node: Any) -> Iterable[str]:
    """All references in a schema."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _stands_alone(reference: str) -> bool:
    """Whether a reference leads to what a property's schema takes along."""
    return reference.startswith(("#/$defs/", "#/definitions/"))
