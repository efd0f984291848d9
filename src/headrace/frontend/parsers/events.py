"""What parsers make of an answer's text: reasoning, content and tool calls, in pieces.

Pieces of one kind belong together in their order; the kinds are independent of each other. How the text was cut on its
way here changes the pieces but never what they join to.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class CallDelta:
    """News of the tool call with this index; ``name`` stands in its first piece alone."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """What became certain with a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def as_json(value: Any) -> str:
    """A value as JSON text; raises ``ValueError`` for one that JSON does not have."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def escape_surrogates(text: str) -> str:
    """JSON text in which half characters stay escapes: as they are nothing could encode them."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class Sink:
    """Collects what a parser of tool calls finds.

    Owns the numbers of the calls and the white space around them: what stands before or after a call is layout, any
    other belongs to the content.
    """

    def __init__(self) -> None:
        self._delta = ParsedDelta()
        self._space = ""
        self._after_call = False
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls that were announced."""
        return self._num_calls

    def text(self, text: str) -> None:
        """Content; white space at its end waits for what follows."""
        if not text:
            return
        if self._after_call:
            text = text.lstrip()
            if not text:
                return
            self._after_call = False
        body = text.rstrip()
        if body:
            self._delta.content += self._space + body
            self._space = ""
        self._space += text[len(body) :]

    def call(self, name: str) -> None:
        """A call begins."""
        self._space = ""
        self._after_call = True
        self._delta.calls.append(CallDelta(self._num_calls, name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """The arguments of the newest call go on."""
        assert self._num_calls, "arguments without a call"
        if not text:
            return
        index = self._num_calls - 1
        if not self._delta.calls or self._delta.calls[-1].index != index:
            self._delta.calls.append(CallDelta(index))
        self._delta.calls[-1].arguments += text

    def end(self) -> None:
        """The text has ended: white space that waited is content."""
        self._delta.content += self._space
        self._space = ""

    def take(self) -> ParsedDelta:
        """What is new."""
        delta, self._delta = self._delta, ParsedDelta()
        return delta


class ToolParser(Protocol):
    """Finds tool calls in a text that comes in pieces."""

    def feed(self, text: str) -> ParsedDelta:
        """Take a piece and return what became certain."""
        ...

    def finish(self) -> ParsedDelta:
        """The text has ended; return what was held."""
        ...
