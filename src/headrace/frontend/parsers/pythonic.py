"""Calls as a Python list: ``[f(a=1), g(b="x")]``, and nothing else in the answer."""

from __future__ import annotations

import ast
import json
import warnings

from headrace.frontend.parsers.events import as_json
from headrace.frontend.parsers.scanning import ScanningParser
from headrace.frontend.tools import Tools

_PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(ScanningParser):
    """Each call is told of when its closing bracket has come."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._lead = ""
        self._state = self._at_start
        self._reset()

    def _reset(self) -> None:
        """Begin to look for the end of a call at the front of the buffer."""
        self._seen = 0
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def _at_start(self) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return False
        if body[0] != "[":
            self._state = self._show_rest
            return True
        self._lead = self._take(len(self._buffer) - len(body) + 1)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        end = self._find_end()
        if end is None:
            if self._final and not self._sink.num_calls:
                self._give_up()
            elif self._final:
                self._buffer = ""
            return False
        call = _parse(self._buffer[:end])
        if call is None or call[0] not in self._tools:
            self._give_up()
            return True
        self._take(end)
        self._sink.call(call[0])
        self._sink.arguments(call[1])
        self._state = self._after_call
        return True

    def _find_end(self) -> int | None:
        """The place after the bracket that closes the first call; 0 when there is no call."""
        while self._seen < len(self._buffer):
            char = self._buffer[self._seen]
            self._seen += 1
            if self._quote:
                if not self._escaped and char == self._quote:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "'\"" and self._open:
                self._quote = char
            elif char in _PAIRS and (self._open or char == "("):
                self._open.append(_PAIRS[char])
            elif self._open:
                if char == self._open[-1]:
                    self._open.pop()
                    if not self._open:
                        return self._seen
                elif char in ")]}":
                    return 0
            elif not (char.isalnum() or char in "_. \t\r\n"):
                return 0
        return None

    def _give_up(self) -> None:
        """No call: all that was taken for one is text."""
        self._sink.text("" if self._sink.num_calls else self._lead)
        self._state = self._show_rest

    def _after_call(self) -> bool:
        self._skip_space()
        if not self._buffer:
            return False
        if self._buffer[0] == ",":
            self._take(1)
            self._reset()
            self._state = self._in_call
        else:
            if self._buffer[0] == "]":
                self._take(1)
            self._state = self._show_rest
        return True


def _parse(text: str) -> tuple[str, str] | None:
    """Name and JSON arguments of ``name(key=literal, …)``, or ``None`` for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = text.strip()
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg: _literal(keyword.value, text) for keyword in call.keywords if keyword.arg}
        if len(arguments) != len(call.keywords):
            return None
        return ast.unparse(call.func), as_json(arguments)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr, text: str) -> object:
    """The value of a literal within ``text``: what is JSON counts as such, all else as Python."""
    try:
        return json.loads(ast.get_source_segment(text, node) or "", strict=False)
    except ValueError:
        return ast.literal_eval(node)
