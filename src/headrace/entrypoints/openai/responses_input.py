"""From a body of ``/v1/responses`` to the chat that asks for the same: one path renders, checks and generates.

What needs stored state is refused by name where nothing is stored.
"""

from __future__ import annotations

from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.body import convert
from headrace.entrypoints.openai.protocol import ChatRequest, ResponsesRequest
from headrace.entrypoints.openai.refusals import REFUSALS, Refusal, one_of
from headrace.entrypoints.openai.responses_items import new_id

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})
"""What ``include`` may name; there is never any encrypted content to include."""
RULES = REFUSALS | {
    "max_tool_calls": Refusal("must be an integer", lambda value: type(value) is int),
    "include": Refusal(f"only {LOGPROBS} can be included", lambda value: set(value) <= _INCLUDABLE),
    "truncation": Refusal("prompts are never cut; use disabled", one_of("disabled")),
    "background": Refusal("answers are made while the client waits; leave it out", one_of(False)),
    "previous_response_id": Refusal("answers are not stored; send the whole conversation as input"),
    "conversation": Refusal("conversations are not stored; send the whole one as input"),
    "prompt": Refusal("prompts are not stored; send instructions and input"),
}
"""This route's table: its own fields, then those of all routes."""
STORED_RULES = {name: rule for name, rule in RULES.items() if name not in ("store", "previous_response_id")}
"""The same where answers are stored."""
_READ_OTHERWISE = frozenset({"store", "stream_options", "tools", "tool_choice", "top_logprobs"})
_SAME_NAME = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in _READ_OTHERWISE
)
_RENAMED = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)


def rename(error: InvalidRequestError) -> InvalidRequestError:
    """The error of the chat in the words of this route."""
    message, param = error.message, error.param
    for theirs, ours in _RENAMED:
        message = message.replace(theirs, ours)
        param = param.replace(theirs, ours) if param else param
    return InvalidRequestError(message, param=param, code=error.code)


def make_chat(body: ResponsesRequest, max_items: int) -> ChatRequest:
    """Return the chat; its input may have at most ``max_items``.

    Raises:
        InvalidRequestError: a wrong shape, or something that is not done; the field is named.
    """
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    values["messages"] = _messages(body, max_items)
    values["max_completion_tokens"] = body.max_output_tokens
    values["response_format"] = _text_format(body.text)
    values["tools"] = None if body.tools is None else [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools)]
    values["tool_choice"] = _tool_choice(body.tool_choice)
    values["reasoning_effort"] = _effort(body.reasoning)
    values["logprobs"] = LOGPROBS in (body.include or ()) or None
    values["top_logprobs"] = _top_logprobs(body)
    if not values["tools"]:
        # An empty list is how clients of this route say that there are none.
        values |= {"tools": None, "tool_choice": None if values["tool_choice"] == "auto" else values["tool_choice"]}
    present = {name: value for name, value in values.items() if value is not None}
    return convert(present, ChatRequest)


def _refuse(where: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {reason}", param=where)


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An input as items, each with an id."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [{"id": new_id("msg"), "type": "message", **item} for item in given]


def _messages(body: ResponsesRequest, max_items: int) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    if not body.input:
        raise _refuse("input", "must not be empty")
    if len(body.input) > max_items:
        raise _refuse("input", f"must not have more than {max_items} entries")
    turns = _Turns(first)
    for index, item in enumerate(body.input):
        turns.add(f"input[{index}]", item)
    return turns.messages


class _Turns:
    """Items to messages: reasoning and calls belong to the assistant's turn that they stand in."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages

    def add(self, where: str, item: dict[str, Any]) -> None:
        """Take the next item."""
        match item.get("type", "message"):
            case "message":
                self._add_message(where, item)
            case "function_call":
                call = {"id": item.get("call_id"), "type": "function"}
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                self._assistant().setdefault("tool_calls", []).append({**call, "function": function})
            case "function_call_output":
                content = _content(f"{where}.output", item.get("output"))
                self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                text = _reasoning_text(where, item)
                if text:
                    turn = self._assistant(new=True)
                    turn["reasoning"] = turn.get("reasoning", "") + text
            case "item_reference":
                raise _refuse(f"{where}.type", "item_reference needs stored answers, and none are stored")
            case _:
                raise _refuse(f"{where}.type", "items must be messages, reasoning, function calls or their outputs")

    def _add_message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str):
            raise _refuse(f"{where}.role", "must be text")
        content = _content(f"{where}.content", item.get("content"))
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == "assistant" and last["content"] is None:
            last["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _assistant(self, new: bool = False) -> dict[str, Any]:
        """The assistant's turn that goes on; ``new`` begins another after content or calls."""
        last = self.messages[-1] if self.messages else {}
        goes_on = last.get("role") == "assistant"
        if not goes_on or (new and (last["content"] is not None or "tool_calls" in last)):
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _content(where: str, content: Any) -> Any:
    """Texts and lists of parts; what the parts may be is checked where the chat is rendered."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return content
    raise _refuse(where, "must be text or a list of parts")


def _reasoning_text(where: str, item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise _refuse(f"{where}.content", "must be a list of parts with text")
    return "\n".join(part["text"] for part in parts)


def _text_format(text: Any) -> Any:
    if text is None:
        return None
    if not isinstance(text, dict):
        raise _refuse("text", "must be an object")
    for name, value in text.items():
        if name == "verbosity" and value in (None, "medium"):
            continue
        if name != "format":
            raise _refuse(f"text.{name[:40]}", "not supported")
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    described = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _refuse(f"{where}.type", "only function tools are supported; the server has none of its own")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        named = choice.get("tools")
        tools = [_tool_choice(one) for one in named] if isinstance(named, list) else named
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def _effort(reasoning: Any) -> Any:
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict):
        raise _refuse("reasoning", "must be an object")
    for name, value in reasoning.items():
        if name != "effort" and value not in (None, "auto"):
            raise _refuse(f"reasoning.{name[:40]}", "not supported; reasoning is given as it is")
    return reasoning.get("effort")


def _top_logprobs(body: ResponsesRequest) -> int | None:
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise _refuse("top_logprobs", f"needs include: [{LOGPROBS}]")
    # 0 is what clients say who want none.
    return body.top_logprobs or None


def describe_body(body: ResponsesRequest) -> dict[str, Any]:
    """What an answer repeats of its request."""
    text = body.text if isinstance(body.text, dict) else {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
