"""Parsers by name, and the ones that a chat template asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from headrace.base.registry import Registry
from headrace.frontend.parsers.events import ToolParser
from headrace.frontend.parsers.json_lists import Llama3JsonParser, MistralParser
from headrace.frontend.parsers.pythonic import PythonicParser
from headrace.frontend.parsers.reasoning import ReasoningFormat
from headrace.frontend.parsers.spelling import (
    ARGS,
    CLOSE,
    OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    tag_hermes,
    tag_llama3_json,
    tag_mistral,
    tag_pythonic,
)
from headrace.frontend.parsers.tags import HermesParser, Qwen3Parser
from headrace.frontend.tools import MakeTag, Tools

TEMPLATE, NONE = "template", "none"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls.

    ``marks`` are those that may be special tokens; ``tag`` holds calls to their schemas.
    """

    make: Callable[[Tools], ToolParser]
    tag: MakeTag
    marks: tuple[str, ...] = ()


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool call parser")
TOOL_FORMATS.register("hermes")(ToolFormat(HermesParser, tag_hermes, (OPEN, CLOSE)))
TOOL_FORMATS.register("qwen3")(ToolFormat(Qwen3Parser, tag_hermes, (OPEN, CLOSE)))
TOOL_FORMATS.register("llama3_json")(ToolFormat(Llama3JsonParser, tag_llama3_json, (PYTHON_TAG,)))
TOOL_FORMATS.register("mistral")(ToolFormat(MistralParser, tag_mistral, (TOOL_CALLS, ARGS, "[CALL_ID]")))
TOOL_FORMATS.register("pythonic")(ToolFormat(PythonicParser, tag_pythonic))

REASONING_FORMATS: Registry[ReasoningFormat] = Registry("reasoning parser")
REASONING_FORMATS.register("deepseek_r1")(ReasoningFormat("<think>", "</think>", always=True))
REASONING_FORMATS.register("qwen3")(ReasoningFormat("<think>", "</think>", always=False))

# The first that a template mentions; a template that mentions none goes with the first form of all.
_TOOL_MARKS = (("<function=", "qwen3"), (OPEN, "hermes"), (TOOL_CALLS, "mistral"), (PYTHON_TAG, "llama3_json"))


def get_tool_format(name: str, template: str) -> ToolFormat:
    """The format with this name, or the one that fits a chat template's source.

    Raises:
        ConfigError: no such format.
    """
    if name == TEMPLATE:
        name = next((form for mark, form in _TOOL_MARKS if mark in template), "hermes")
    try:
        return TOOL_FORMATS.get(name)
    except KeyError as error:
        raise ConfigError(f"--tool-call-parser: {error.args[0]}") from None


def get_reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The same for reasoning; ``None`` when answers have none to look for.

    Raises:
        ConfigError: no such format.
    """
    if name == TEMPLATE:
        name = "qwen3" if "</think>" in template else NONE
    if name == NONE:
        return None
    try:
        return REASONING_FORMATS.get(name)
    except KeyError as error:
        raise ConfigError(f"--reasoning-parser: {error.args[0]}") from None
