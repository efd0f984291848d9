"""Calls between ``<tool_call>`` and ``</tool_call>``: as JSON (Hermes) or as tagged parameters too (Qwen)."""

from __future__ import annotations

import json
from typing import Any

from headrace.frontend.parsers.events import as_json
from headrace.frontend.parsers.json_call import CallState, JsonCall
from headrace.frontend.parsers.scanning import ScanningParser, find_mark
from headrace.frontend.parsers.spelling import CLOSE, OPEN
from headrace.frontend.tools import Tools

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class HermesParser(ScanningParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as often as there are calls."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._call: JsonCall | None = None
        self._state = self._in_text

    def _in_text(self) -> bool:
        if self._show_until(OPEN) is None:
            return False
        self._call = JsonCall(self._tools, self._sink)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        self._take(call.feed(self._buffer))
        if call.state is CallState.OPEN:
            if self._final and not call.announced:
                self._sink.text(OPEN + call.raw)
            return False
        if not call.announced:
            # No call after all: it is text, from its mark on.
            self._sink.text(OPEN + call.raw)
            self._state = self._in_text
        else:
            self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        self._skip_space()
        closed = self._take_mark(CLOSE)
        if closed is None:
            return False
        self._state = self._in_text
        return True


class Qwen3Parser(HermesParser):
    """As `HermesParser`, and ``<function=NAME><parameter=KEY>value</parameter></function>`` in the same tags."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._properties: dict[str, Any] = {}
        self._num_parameters = 0
        self._space = ""

    def _in_text(self) -> bool:
        if self._show_until(OPEN) is None:
            return False
        self._call = JsonCall(self._tools, self._sink)
        self._space = ""
        self._state = self._choose_form
        return True

    def _choose_form(self) -> bool:
        body = self._buffer.lstrip()
        self._space += self._take(len(self._buffer) - len(body))
        tagged = self._take_mark(_FUNCTION)
        if tagged is None:
            return False
        if tagged:
            self._state = self._in_name
        else:
            self._buffer = self._space + self._buffer
            self._state = self._in_call
        return True

    def _in_name(self) -> bool:
        end = self._buffer.find(">")
        if end < 0:
            if self._final:
                self._sink.text(OPEN + self._space + _FUNCTION)
            return False
        name = self._buffer[:end].strip()
        if name not in self._tools:
            self._sink.text(OPEN + self._space + _FUNCTION)
            self._state = self._in_text
            return True
        self._take(end + 1)
        self._sink.call(name)
        properties = self._tools[name].parameters.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._num_parameters = 0
        self._state = self._between
        return True

    def _between(self) -> bool:
        self._skip_space()
        begun = self._take_mark(_PARAMETER)
        if begun:
            self._state = self._in_parameter
            return True
        ended = self._take_mark(_FUNCTION_END)
        if begun is None or ended is None:
            return False
        if not ended and not self._buffer and not self._final:
            return False
        if ended or self._buffer:
            self._sink.arguments("}" if self._num_parameters else "{}")
            self._state = self._after_call
            return True
        return False

    def _in_parameter(self) -> bool:
        name_end = self._buffer.find(">")
        found = find_mark(self._buffer[name_end + 1 :], (_PARAMETER_END,)) if name_end >= 0 else None
        if found is None:
            # A parameter that was cut off is left out: half a value would be a wrong one.
            if self._final:
                self._buffer = ""
            return False
        key = self._take(name_end + 1)[:-1].strip()
        value = self._take(found[0]).removeprefix("\n").removesuffix("\n")
        self._take(len(_PARAMETER_END))
        lead = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._sink.arguments(f"{lead}{as_json(key)}: {self._as_json(key, value)}")
        self._state = self._between
        return True

    def _as_json(self, key: str, value: str) -> str:
        """A value as its schema wants it: text stays text, anything else is JSON if it can be read as such."""
        schema = self._properties.get(key)
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            try:
                return as_json(json.loads(value))
            except (ValueError, RecursionError):
                pass
        return as_json(value)
