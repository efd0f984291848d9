"""One tool call written as a JSON object with a name and arguments, read character by character."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from headrace.frontend.parsers.events import Sink

_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"


class CallState(Enum):
    """Whether the object goes on, has ended, or is no call."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


class JsonValue:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_object(self) -> bool:
        """Whether the value is an object or a list, and can therefore be handed on as it comes."""
        return self.text[:1] in ("{", "[")

    def feed(self, char: str) -> bool:
        """Take the next character; ``False`` when the value ended before it."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            self.done = not self._in_string and self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                self.done = True
                return False
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth == 0 and (char == "," or char in _SPACE):
            self.done = True
            return False
        self.text += char
        return True


class JsonCall:
    """Reads ``{"name": …, "arguments": …}``, in any order, with other keys left out.

    The call is announced when its name is known, if that is the name of a tool; from then on it stands, whatever comes.
    Before that the object may turn out to be no call, and ``raw`` has all that was taken for one.

    Args:
        names: of the tools.
        sink: is told of the call.
    """

    def __init__(self, names: Collection[str], sink: Sink) -> None:
        self._names = names
        self._sink = sink
        self.state = CallState.OPEN
        self.raw = ""
        self._announced = False
        self._has_arguments = False
        self._held_arguments: str | None = None
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._step = self._at_start

    def feed(self, text: str) -> int:
        """Take characters up to the end of the call; returns how many."""
        for count, char in enumerate(text):
            if self.state is not CallState.OPEN:
                return count
            if not self._announced:
                self.raw += char
            self._step(char)
        return len(text)

    @property
    def announced(self) -> bool:
        """Whether the call has been told of."""
        return self._announced

    def _expect(self, char: str, wanted: str) -> bool:
        if char in _SPACE:
            return False
        if char != wanted:
            self.state = CallState.BROKEN
            return False
        return True

    def _at_start(self, char: str) -> None:
        if self._expect(char, "{"):
            self._step = self._before_key

    def _before_key(self, char: str) -> None:
        if char in _SPACE or char == ",":
            return
        if char == "}":
            self._end()
        elif char == '"':
            self._value = JsonValue()
            self._value.feed(char)
            self._step = self._in_key
        else:
            self.state = CallState.BROKEN

    def _in_key(self, char: str) -> None:
        assert self._value is not None
        self._value.feed(char)
        if self._value.done:
            self._key = _load_text(self._value.text)
            self._step = self._before_colon

    def _before_colon(self, char: str) -> None:
        if self._expect(char, ":"):
            self._step = self._before_value

    def _before_value(self, char: str) -> None:
        if char in _SPACE:
            return
        if char in ",}]:":
            self.state = CallState.BROKEN
            return
        self._value = JsonValue()
        self._step = self._in_value
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        assert self._value is not None
        value, is_arguments = self._value, self._key in _ARGUMENT_KEYS and not self._has_arguments
        taken = value.feed(char)
        if taken and is_arguments and self._announced and value.is_object:
            self._sink.arguments(char)
        if value.done:
            self._end_value(value, is_arguments)
            self._step = self._before_key
            if not taken:
                self._before_key(char)

    def _end_value(self, value: JsonValue, is_arguments: bool) -> None:
        if is_arguments:
            self._has_arguments = True
            if not self._announced:
                self._held_arguments = _as_arguments(value)
            elif not value.is_object:
                self._sink.arguments(_as_arguments(value))
        elif self._key in _NAME_KEYS and not self._announced:
            name = _load_text(value.text)
            if name not in self._names:
                self.state = CallState.BROKEN
                return
            self._announced = True
            self._sink.call(name)
            self._sink.arguments(self._held_arguments or "")

    def _end(self) -> None:
        if not self._announced:
            self.state = CallState.BROKEN
            return
        if not self._has_arguments:
            self._sink.arguments("{}")
        self.state = CallState.DONE


def _load_text(text: str) -> str:
    """A JSON string's value; something that is no name for anything else."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _as_arguments(value: JsonValue) -> str:
    """Arguments that came as a JSON string are what it holds; null is none."""
    if value.is_object:
        return value.text
    if value.text.startswith('"'):
        return _load_text(value.text)
    return "{}" if value.text == "null" else value.text
