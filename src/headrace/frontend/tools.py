"""The tools of a request: what the API may say about them, and what follows for generation.

Owns the checks of ``tools``, ``tool_choice`` and ``parallel_tool_calls``, and the schema that enforces required and
named calls. It knows nothing of how a model writes calls of its own accord (``frontend.parsers``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection
from headrace.frontend.json_schema import clean_schema, inline_root
from headrace.messages.sampling_params import StructuredOutputParams

MAX_FORCED_CALLS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function: its name and the JSON schema of its arguments.

    The schema has been checked where something is to hold to it; any other is the model's to read alone.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool


Tools = Mapping[str, Tool]

MakeTag = Callable[[Tools], dict[str, Any]]
"""From tools to the structural tag that holds a model's own calls of them to their schemas."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request wants with tools.

    ``tools`` may be called; the model is shown ``sources``, which may be more. ``mode`` is ``none`` when nothing is to
    be looked for in the answer. ``name`` is set under ``named`` alone.
    """

    tools: Tools = field(default_factory=dict)
    sources: Sequence[dict[str, Any]] = ()
    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    parallel: bool = True

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        return None if self.mode == "none" else list(self.sources)

    def constraint(self, make_tag: MakeTag) -> StructuredOutputParams | None:
        """The constraint that makes sure of calls, or of the arguments of strict functions where the model decides.

        Args:
            make_tag: for calls that the model writes of its own accord.

        Raises:
            InvalidRequestError: its form of calls cannot hold to the schema of a strict function.
        """
        if self.mode == "auto" and any(tool.strict for tool in self.tools.values()):
            return StructuredOutputParams(structural_tag=json.dumps(make_tag(self.tools), ensure_ascii=False))
        if self.mode == "named":
            return StructuredOutputParams(json=json.dumps(self.tools[self.name].parameters))
        if self.mode != "required":
            return None
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": MAX_FORCED_CALLS if self.parallel else 1}
        definitions: dict[str, Any] = {}
        calls = []
        for number, tool in enumerate(self.tools.values()):
            properties = {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/tool{number}"}}
            definitions[f"tool{number}"] = inline_root(tool.parameters, f"#/$defs/tool{number}")
            call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
            calls.append({**call, "additionalProperties": False})
        schema["items"] = {"anyOf": calls}
        schema["$defs"] = definitions
        return StructuredOutputParams(json=json.dumps(schema))


def plan_tools(tools: Any, tool_choice: Any, parallel: bool | None, most: LimitsSection) -> ToolPlan:
    """Check what a request says about tools.

    Raises:
        InvalidRequestError: a wrong shape, an unknown function, or a choice without tools.
    """
    known = _parse_tools(tools, most)
    tool_choice, allowed = _parse_allowed(tool_choice, known)
    mode, name = _parse_choice(tool_choice, known)
    for place, tool in enumerate(known.values()):
        if tool.strict or mode == "required" or (mode == "named" and tool.name == name):
            schema = clean_schema(tool.parameters, f"tools[{place}].function.parameters", most)
            known[tool.name] = replace(tool, parameters=schema)
    callable_ = {name: tool for name, tool in known.items() if name in allowed}
    return ToolPlan(callable_, tools or (), mode, name, parallel is not False)


def _parse_tools(tools: Any, most: LimitsSection) -> dict[str, Tool]:
    if tools is None:
        return {}
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError("tools must be a list that is not empty", param="tools")
    if len(tools) > most.max_tools:
        raise InvalidRequestError(f"tools must not have more than {most.max_tools} entries", param="tools")
    if len(json.dumps(tools, ensure_ascii=False)) > most.max_tools_chars:
        message = f"tools must not be longer than {most.max_tools_chars} characters"
        raise InvalidRequestError(message, param="tools")
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        parsed = _parse_tool(where, tool)
        if parsed.name in known:
            raise InvalidRequestError(f"{where}.function.name is used twice", param=f"{where}.function.name")
        known[parsed.name] = parsed
    return known


def _parse_tool(where: str, tool: Any) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidRequestError(f"{where}: only tools of the type function are supported", param=f"{where}.type")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores"
        raise InvalidRequestError(message, param=f"{where}.function.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.function.description must be text", param=f"{where}.function.description")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        message = f"{where}.function.parameters must be the JSON schema of an object"
        raise InvalidRequestError(message, param=f"{where}.function.parameters")
    return Tool(name, parameters, bool(function.get("strict")))


def _parse_allowed(choice: Any, tools: Tools) -> tuple[Any, Collection[str]]:
    """The choice itself, and which functions it leaves: all, but for ``allowed_tools``, which names them."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, tools.keys()
    described = choice.get("allowed_tools")
    mode = described.get("mode") if isinstance(described, dict) else None
    named = described.get("tools") if isinstance(described, dict) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        message = "tool_choice.allowed_tools needs a mode (auto or required) and tools"
        raise InvalidRequestError(message, param="tool_choice.allowed_tools")
    allowed = {_parse_choice(one, tools)[1] for one in named}
    if "" in allowed:
        message = "tool_choice.allowed_tools.tools must name functions"
        raise InvalidRequestError(message, param="tool_choice.allowed_tools")
    return mode, allowed


def _parse_choice(choice: Any, tools: Tools) -> tuple[Literal["none", "auto", "required", "named"], str]:
    if choice is None:
        return ("auto" if tools else "none"), ""
    if choice == "none":
        return "none", ""
    if isinstance(choice, str) and choice not in ("auto", "required"):
        message = "tool_choice must be none, auto, required or name a function"
        raise InvalidRequestError(message, param="tool_choice")
    if not tools:
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    if choice == "auto":
        return "auto", ""
    if choice == "required":
        return "required", ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        message = 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}'
        raise InvalidRequestError(message, param="tool_choice")
    if name not in tools:
        raise InvalidRequestError("tool_choice names a function that is not among the tools", param="tool_choice")
    return "named", name


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the conversation with the tools told of in its system turn, for templates that have no place for them."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    text = "\n".join(
        [
            "You may call functions. Each line between <tools> and </tools> describes one:",
            "<tools>",
            *lines,
            "</tools>",
            "To call a function, answer with its name and arguments in this form:",
            '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>',
        ]
    )
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content") or ""
    joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [{**first, "content": joined}, *messages[1:]]
