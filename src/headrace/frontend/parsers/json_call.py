"""One tool call written as a JSON object with a name and arguments, read as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from enum import Enum, auto

from headrace.frontend.parsers.events import Sink, escape_surrogates

_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"
_STRING_END = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r'["{}\[\], \t\r\n]')


class CallState(Enum):
    """Whether the object goes on, has ended, or is no call."""

    OPEN = auto()
    DONE = auto()
    BROKEN = auto()


class JsonValue:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.done = False
        self._parts: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def text(self) -> str:
        """What was taken."""
        return "".join(self._parts)

    @property
    def is_object(self) -> bool:
        """Whether the value is an object or a list, and can therefore be handed on as it comes."""
        return bool(self._parts) and self._parts[0][0] in "{["

    def take(self, text: str, place: int) -> int:
        """Take from ``place`` on, up to the end of the value; returns the place after it."""
        start = place
        while place < len(text) and not self.done:
            place = self._in_text(text, place) if self._in_string else self._between(text, place)
        if place > start:
            self._parts.append(text[start:place])
        return place

    def _in_text(self, text: str, place: int) -> int:
        if self._escaped:
            self._escaped = False
            return place + 1
        found = _STRING_END.search(text, place)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _between(self, text: str, place: int) -> int:
        found = (_STRUCTURE if self._depth else _SCALAR_END).search(text, place)
        if found is None:
            return len(text)
        char = found[0]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif self._depth:
            self._depth -= 1
            self.done = self._depth == 0
        else:
            # What ends a number or a word is not part of it.
            self.done = True
            return found.start()
        return found.end()


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
        self.announced = False
        self._raw: list[str] = []
        self._has_arguments = False
        self._held_arguments = ""
        self._key = ""
        self._value = JsonValue()
        self._step: Callable[[str, int], int] = self._at_start

    @property
    def raw(self) -> str:
        """What was taken before the call was announced."""
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Take characters up to the end of the call; returns how many."""
        place = 0
        while place < len(text) and self.state is CallState.OPEN:
            held = not self.announced
            end = self._step(text, place)
            if held:
                self._raw.append(text[place:end])
            place = end
        return place

    def _at_start(self, text: str, place: int) -> int:
        if text[place] == "{":
            self._step = self._before_key
        elif text[place] not in _SPACE:
            self.state = CallState.BROKEN
        return place + 1

    def _before_key(self, text: str, place: int) -> int:
        char = text[place]
        if char == '"':
            self._value = JsonValue()
            self._step = self._in_key
            return place
        if char == "}":
            self._end()
        elif char not in _SPACE and char != ",":
            self.state = CallState.BROKEN
        return place + 1

    def _in_key(self, text: str, place: int) -> int:
        place = self._value.take(text, place)
        if self._value.done:
            self._key = _load_text(self._value.text)
            self._step = self._before_colon
        return place

    def _before_colon(self, text: str, place: int) -> int:
        if text[place] == ":":
            self._step = self._before_value
        elif text[place] not in _SPACE:
            self.state = CallState.BROKEN
        return place + 1

    def _before_value(self, text: str, place: int) -> int:
        if text[place] in _SPACE:
            return place + 1
        if text[place] in ",}]:":
            self.state = CallState.BROKEN
            return place + 1
        self._value = JsonValue()
        self._step = self._in_value
        return place

    def _in_value(self, text: str, place: int) -> int:
        value, is_arguments = self._value, self._key in _ARGUMENT_KEYS and not self._has_arguments
        end = value.take(text, place)
        if is_arguments and self.announced and value.is_object:
            self._sink.arguments(text[place:end])
        if value.done:
            self._step = self._before_key
            self._end_value(is_arguments)
        return end

    def _end_value(self, is_arguments: bool) -> None:
        value = self._value
        if is_arguments:
            self._has_arguments = True
            if not self.announced:
                self._held_arguments = _as_arguments(value)
            elif not value.is_object:
                self._sink.arguments(_as_arguments(value))
        elif self._key in _NAME_KEYS and not self.announced:
            name = _load_text(value.text)
            if name not in self._names:
                self.state = CallState.BROKEN
                return
            self.announced = True
            self._sink.call(name)
            self._sink.arguments(self._held_arguments)

    def _end(self) -> None:
        if not self.announced:
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
        return escape_surrogates(_load_text(value.text))
    return "{}" if value.text == "null" else value.text
