"""Messages to prompt text, through the model's own chat template.

Owns which templates may run (the model's or the operator's, never a request's), what they may see (the messages in the
shape that templates expect, and only the variables that the template reads) and how long and how large a rendering may
get. A template's own complaint becomes an `InvalidRequestError` with its words. It knows nothing of tokens.

Templates run in a sandbox: no attribute with an underscore, nothing mutable, `range` bounded, and every call and every
written piece checks the deadline, so that no loop outlives it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import ConfigError, InvalidRequestError

MAX_PARTS = 1024
MAX_ARGUMENTS_CHARS = 1 << 20
MAX_TEMPLATE_CHARS = 1 << 20
MAX_REASON_CHARS = 500
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
RESERVED_NAMES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_tensors",
        "return_dict",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "raise_exception",
        "strftime_now",
    }
)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_END_MARK = "\ue000headrace-final-message\ue001"


class _TemplateTimeout(jinja2.TemplateError):
    """The rendering passed its deadline."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for training; for serving it is just its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a deadline per thread."""

    def __init__(self, clock: Clock) -> None:
        extensions: list[Any] = ["jinja2.ext.loopcontrols", _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._clock = clock
        self._local = threading.local()
        self.filters["tojson"] = _tojson
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }

    def start(self, limit_s: float) -> None:
        """Give this thread's rendering ``limit_s`` seconds."""
        self._local.deadline = self._clock.monotonic() + limit_s

    def check_time(self) -> None:
        """Raise if this thread's rendering is late."""
        if self._clock.monotonic() > self._local.deadline:
            raise _TemplateTimeout("it took too long")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(*args, **kwargs)

    def _strftime_now(self, form: str) -> str:
        return datetime.fromtimestamp(self._clock.wall()).strftime(form)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escapes, keys in their own order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the template's text.
        tokens: special tokens that templates name (``bos_token``, ``eos_token``, …) with their text.
        limit_s: how long a rendering may take.
        max_chars: how long a rendering may get.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        limit_s: float = 5.0,
        max_chars: int = 1 << 26,
        clock: Clock | None = None,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"chat template: longer than {MAX_TEMPLATE_CHARS} characters")
        self._env = _Sandbox(clock or SystemClock())
        self._limit_s = limit_s
        self._max_chars = max_chars
        try:
            tree = self._env.parse(source)
            self._template = self._env.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template: line {error.lineno}: {error.message}") from None
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self._tokens = {name: text for name, text in tokens.items() if name in self.variables}
        self.wants_parts = _loops_over_content(tree)
        self._knows_developer = "developer" in source

    def check(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise `InvalidRequestError` for messages in a wrong shape."""
        self._shape(messages)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: dicts with ``role`` and ``content`` as the OpenAI API has them.
            add_generation_prompt: end with the opening of an assistant's turn.
            continue_final_message: end inside the last message, so that it goes on.
            chat_template_kwargs: further variables; those that the template does not read are left out.

        Raises:
            InvalidRequestError: messages in a wrong shape, reserved variables, or the template's own complaint.
        """
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message and add_generation_prompt must not both be true"
            raise InvalidRequestError(message, param="continue_final_message")
        shaped = self._shape(messages)
        if continue_final_message:
            self._mark_final(shaped)
        given = _checked(chat_template_kwargs)
        variables: dict[str, Any] = {name: value for name, value in given.items() if name in self.variables}
        variables |= self._tokens
        variables |= {"messages": shaped, "add_generation_prompt": add_generation_prompt}
        if tools:
            variables["tools"] = list(tools)
        if documents:
            variables["documents"] = list(documents)
        text = self._run(variables)
        if continue_final_message:
            end = text.rfind(_END_MARK)
            if end < 0:
                message = "the chat template does not show the final message, so it cannot be continued"
                raise InvalidRequestError(message, param="continue_final_message")
            text = text[:end]
        return text

    def _run(self, variables: dict[str, Any]) -> str:
        self._env.start(self._limit_s)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                self._env.check_time()
                parts.append(part)
                size += len(part)
                if size > self._max_chars:
                    raise InvalidRequestError(f"messages: longer than {self._max_chars} characters", param="messages")
        except InvalidRequestError:
            raise
        except _TemplateTimeout:
            message = f"rendering the chat template took longer than {self._limit_s:g} s"
            raise InvalidRequestError(message, param="messages") from None
        except jinja2.UndefinedError as error:
            raise InvalidRequestError(f"chat template: {_short(error)}", param="messages") from None
        except jinja2.TemplateError as error:
            raise InvalidRequestError(_short(error), param="messages") from None
        except Exception as error:  # noqa: BLE001 - whatever a template cannot take is the request's fault
            message = f"the chat template cannot render these messages: {_short(error)}"
            raise InvalidRequestError(message, param="messages") from None
        return "".join(parts)

    def _shape(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidRequestError("messages must be a list that is not empty", param="messages")
        return [self._shape_one(index, message) for index, message in enumerate(messages)]

    def _shape_one(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{where} must be an object", param=where)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequestError(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
        shaped = {name: value for name, value in message.items() if value is not None}
        if role == "developer" and not self._knows_developer:
            shaped["role"] = "system"
        shaped["content"] = self._shape_content(f"{where}.content", message.get("content"))
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            shaped["reasoning_content"] = shaped["reasoning"] = reasoning
        calls = message.get("tool_calls")
        if not calls and message.get("function_call"):
            # The older way of saying it.
            calls = [{"type": "function", "function": message["function_call"]}]
        for name in ("tool_calls", "function_call"):
            shaped.pop(name, None)
        if calls:
            shaped["tool_calls"] = _shape_calls(f"{where}.tool_calls", calls)
        elif message.get("content") is None and role not in ("assistant", "tool", "function"):
            raise InvalidRequestError(f"{where}.content must not be null", param=f"{where}.content")
        return shaped

    def _shape_content(self, where: str, content: Any) -> str | list[dict[str, str]]:
        if content is None:
            return ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.wants_parts else content
        if not isinstance(content, (list, tuple)):
            raise InvalidRequestError(f"{where} must be text or a list of parts", param=where)
        if len(content) > MAX_PARTS:
            raise InvalidRequestError(f"{where}: at most {MAX_PARTS} parts are allowed", param=where)
        texts = [_part_text(f"{where}[{index}]", part) for index, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts] if self.wants_parts else "\n".join(texts)

    def _mark_final(self, shaped: list[dict[str, Any]]) -> None:
        content = shaped[-1]["content"]
        if isinstance(content, str):
            shaped[-1]["content"] = content + _END_MARK
        elif content:
            content[-1]["text"] += _END_MARK


def _short(error: Exception) -> str:
    return str(error)[:MAX_REASON_CHARS] or type(error).__name__


def _checked(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    reserved = sorted(RESERVED_NAMES & set(kwargs))
    if reserved:
        message = f"chat_template_kwargs must not set {', '.join(reserved)}"
        raise InvalidRequestError(message, param="chat_template_kwargs")
    return kwargs


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        named = f"'{kind[:40]}'" if isinstance(kind, str) else "without a type"
        raise InvalidRequestError(f"{where}: content parts {named} are not supported, only text", param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{_TEXT_PARTS[kind]} must be text", param=where)
    return text


def _shape_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which is how templates write them out."""
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequestError(f"{where} must be a list", param=where)
    shaped = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise InvalidRequestError(f"{where}[{index}].function needs a name", param=f"{where}[{index}]")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        elif isinstance(arguments, str):
            at = f"{where}[{index}].function.arguments"
            if len(arguments) > MAX_ARGUMENTS_CHARS:
                message = f"{at} must not be longer than {MAX_ARGUMENTS_CHARS} characters"
                raise InvalidRequestError(message, param=at)
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise InvalidRequestError(f"{at} must be JSON", param=at) from None
        shaped.append({**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}})
    return shaped


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template walks through ``content`` itself, and so wants the list of parts."""
    aliases = {"content"}
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and _names_content(assign.node, {"content"}):
            aliases.add(assign.target.name)
    return any(_names_content(loop.iter, aliases) for loop in tree.find_all(jinja2.nodes.For))


def _names_content(node: jinja2.nodes.Node, names: set[str]) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names
