"""Calls as bare JSON: Llama 3's objects, Mistral's list behind a mark, and the list that a grammar enforces."""

from __future__ import annotations

from collections.abc import Callable

from headrace.frontend.parsers.json_call import CallState, JsonCall, JsonValue
from headrace.frontend.parsers.scanning import ScanningParser, find_mark
from headrace.frontend.parsers.spelling import ARGS, PYTHON_TAG, TOOL_CALLS
from headrace.frontend.tools import Tools

_CALL_ID = "[CALL_ID]"


class _ListParser(ScanningParser):
    """What these forms share: a call, then what may follow it."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._call = JsonCall(tools, self._sink)
        self._lead = ""

    def _begin(self, lead: str) -> None:
        """A call begins here; ``lead`` is what stood before it, should it be none."""
        self._call = JsonCall(self._tools, self._sink)
        self._lead = lead
        self._state = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        self._take(call.feed(self._buffer))
        if call.state is CallState.OPEN:
            if self._final and not call.announced:
                self._sink.text(self._lead + call.raw)
            return False
        if call.announced:
            self._state = self._after_call
        else:
            self._sink.text(self._lead + call.raw)
            self._state = self._no_call
        return True

    def _after_call(self) -> bool:
        raise NotImplementedError

    def _no_call(self) -> bool:
        """State after what looked like a call and was none."""
        return self._show_rest()


class Llama3JsonParser(_ListParser):
    """The whole answer is ``{"name": …, "parameters": {…}}``, or several of them with ``;`` between."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._space = ""
        self._state = self._at_start

    def _at_start(self) -> bool:
        body = self._buffer.lstrip()
        self._space += self._take(len(self._buffer) - len(body))
        tagged = self._take_mark(PYTHON_TAG)
        if tagged is None:
            return False
        if tagged:
            self._begin(self._space + PYTHON_TAG)
        elif self._buffer.startswith("{"):
            self._begin(self._space)
        else:
            self._sink.text(self._space)
            self._state = self._show_rest
        return True

    def _after_call(self) -> bool:
        self._buffer = self._buffer.lstrip(" \t\r\n;,")
        tagged = self._take_mark(PYTHON_TAG)
        if tagged is None or (not self._buffer and not tagged):
            return False
        if self._buffer.startswith("{") or tagged:
            self._begin(PYTHON_TAG if tagged else "")
        else:
            self._state = self._show_rest
        return True


class ArrayParser(_ListParser):
    """The whole answer is ``[{"name": …, "arguments": {…}}, …]``: what a grammar enforces for required calls."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._state = self._at_start

    def _at_start(self) -> bool:
        if not self._buffer.lstrip():
            return False
        body = self._buffer.lstrip()
        if body[0] == "[":
            self._buffer = body[1:]
            self._begin("[")
        elif body[0] == "{":
            self._buffer = body
            self._begin("")
        else:
            self._state = self._show_rest
        return True

    def _after_call(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        end = self._take(1)
        if end == ",":
            self._begin("")
        elif end == "]":
            self._state = self._at_end()
        else:
            self._buffer = end + self._buffer
            self._state = self._show_rest
        return True

    def _at_end(self) -> Callable[[], bool]:
        """The state after the list."""
        return self._show_rest


class MistralParser(ArrayParser):
    """``[TOOL_CALLS]`` and then a list as above, or ``name{…}`` (also ``name[ARGS]{…}``) for each call."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._value = JsonValue()
        self._state = self._in_text

    def _in_text(self) -> bool:
        if self._show_until(TOOL_CALLS) is None:
            return False
        self._state = self._choose_form
        return True

    def _choose_form(self) -> bool:
        body = self._buffer.lstrip()
        if not body:
            if self._final:
                self._sink.text(TOOL_CALLS)
            return False
        if body[0] in "[{":
            self._buffer = body[1:] if body[0] == "[" else body
            self._begin(TOOL_CALLS + ("[" if body[0] == "[" else ""))
        else:
            self._state = self._in_name
        return True

    def _in_name(self) -> bool:
        end = self._buffer.find("{")
        if end < 0:
            if self._final:
                self._sink.text(TOOL_CALLS)
            return False
        found = find_mark(self._buffer[:end], (_CALL_ID, ARGS))
        name = self._buffer[: end if found is None else found[0]].strip()
        if name not in self._tools:
            self._sink.text(TOOL_CALLS)
            self._state = self._in_text
            return True
        self._take(end)
        self._sink.call(name)
        self._value = JsonValue()
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        self._sink.arguments(self._take(self._value.take(self._buffer, 0)))
        if self._value.done:
            self._state = self._in_text
        return self._value.done

    def _at_end(self) -> Callable[[], bool]:
        return self._in_text

    def _no_call(self) -> bool:
        self._state = self._in_text
        return True


class NamedParser(ScanningParser):
    """The whole answer is the arguments of one call: what a grammar enforces when the request names the function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._state = self._in_arguments

    def _in_arguments(self) -> bool:
        if not self._sink.num_calls:
            self._skip_space()
            if not self._buffer:
                return False
            self._sink.call(self._name)
        body = self._buffer if self._final else self._buffer.rstrip()
        self._sink.arguments(self._take(len(body)).rstrip() if self._final else self._take(len(body)))
        return False
