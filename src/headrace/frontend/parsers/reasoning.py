"""Splits an answer into its reasoning and the rest.

The marks themselves and the white space around them are layout. Where the reasoning was opened by the prompt, or where
a model never writes the opening mark, an answer begins inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.frontend.parsers.scanning import num_held
from headrace.messages.sampling_params import ReasoningSpan


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        start, end: the marks.
        always: whether an answer begins inside unless the prompt has closed the reasoning.
    """

    start: str
    end: str
    always: bool

    def begins_inside(self, prompt: str) -> bool | None:
        """Whether an answer to ``prompt`` begins inside the reasoning; ``None`` when that is the model's choice."""
        tail = prompt[-256:].rstrip()
        if tail.endswith(self.start):
            return True
        if tail.endswith(self.end):
            return False
        return True if self.always else None

    def span(self, prompt: str) -> ReasoningSpan | None:
        """What a grammar has to let pass first."""
        inside = self.begins_inside(prompt)
        return None if inside is False else ReasoningSpan(self.start, self.end, inside is True)


class ReasoningParser:
    """See the module.

    Args:
        form: the marks.
        prompt: the text that is answered.
    """

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        self._form = form
        self._buffer = ""
        self._final = False
        self._space = ""
        self._began = False
        self._reasoning = ""
        self._content = ""
        self._num_seen = 0
        self._num_reasoning: int | None = None
        inside = form.begins_inside(prompt)
        self._state: Callable[[], bool] = self._at_start
        if inside is False:
            self._num_reasoning = 0
            self._state = self._in_content
        self._begins_inside = inside is True

    @property
    def num_chars(self) -> int:
        """Characters of the text so far that belong to the reasoning, its marks included."""
        return self._num_seen if self._num_reasoning is None else self._num_reasoning

    @property
    def ended(self) -> bool:
        """Whether everything from here on is content."""
        return self._num_reasoning is not None

    def feed(self, text: str) -> tuple[str, str]:
        """Take a piece and return what became certain, reasoning and content."""
        self._num_seen += len(text)
        self._buffer += text
        return self._run()

    def finish(self) -> tuple[str, str]:
        """The text has ended; return what was held."""
        self._final = True
        return self._run()

    def _run(self) -> tuple[str, str]:
        while self._state():
            pass
        made = self._reasoning, self._content
        self._reasoning = self._content = ""
        return made

    def _end_reasoning(self) -> None:
        self._num_reasoning = self._num_seen - len(self._buffer)

    def _at_start(self) -> bool:
        start, body = self._form.start, self._buffer.lstrip()
        if body.startswith(start):
            self._buffer = body[len(start) :]
            self._state = self._in_reasoning
            return True
        if not self._final and start.startswith(body):
            return False
        if self._begins_inside:
            self._state = self._in_reasoning
        else:
            self._num_reasoning = 0
            self._state = self._in_unmarked
        return True

    def _in_unmarked(self) -> bool:
        """State: no reasoning was opened; an end mark without a beginning is left out, for it is no text."""
        end = self._form.end
        before, found, after = self._buffer.partition(end)
        held = 0 if found or self._final else num_held(before, (end,))
        self._content += before[: len(before) - held]
        self._buffer = after if found else before[len(before) - held :]
        if found:
            self._state = self._in_content
        return bool(found)

    def _in_reasoning(self) -> bool:
        end = self._form.end
        place = self._buffer.find(end)
        if place >= 0:
            self._show_reasoning(self._buffer[:place])
            self._buffer = self._buffer[place + len(end) :]
            self._space = ""
            self._end_reasoning()
            self._state = self._before_content
            return True
        size = len(self._buffer) - (0 if self._final else num_held(self._buffer, (end,)))
        self._show_reasoning(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return False

    def _show_reasoning(self, text: str) -> None:
        """Hand on text without the white space at both ends of the whole."""
        if not self._began:
            text = text.lstrip()
            self._began = bool(text)
        body = text.rstrip()
        if body:
            self._reasoning += self._space + body
            self._space = ""
        self._space += text[len(body) :]

    def _before_content(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._in_content
        return True

    def _in_content(self) -> bool:
        self._content += self._buffer
        self._buffer = ""
        return False
