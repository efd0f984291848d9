"""Text in pieces, looked through for marks, and the loop that every parser of tool calls shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.frontend.parsers.events import ParsedDelta, Sink


def num_held(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a mark."""
    most = min(len(text), max(map(len, marks)) - 1)
    for size in range(most, 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The place of the first mark in ``text``, and the mark."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found) if found else None


class ScanningParser:
    """A parser as a machine over a buffer.

    A subclass sets ``_state`` to one of its methods. A state takes what it can from the front of ``_buffer`` and tells
    whether it got anywhere; it must decide on characters that more text cannot change, or, once ``_final`` is set, on
    all there is. That is what makes the result independent of how the text was cut.
    """

    def __init__(self) -> None:
        self._sink = Sink()
        self._buffer = ""
        self._final = False
        self._state: Callable[[], bool] = self._show_rest

    def feed(self, text: str) -> ParsedDelta:
        """Take a piece and return what became certain."""
        self._buffer += text
        self._run()
        return self._sink.take()

    def finish(self) -> ParsedDelta:
        """The text has ended; return what was held."""
        self._final = True
        self._run()
        self._sink.text(self._take(len(self._buffer)))
        self._sink.end()
        return self._sink.take()

    def _run(self) -> None:
        while self._state():
            pass

    def _take(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _skip_space(self) -> None:
        self._buffer = self._buffer.lstrip()

    def _take_mark(self, mark: str) -> bool | None:
        """Whether the buffer begins with ``mark``, which is taken; ``None`` when that cannot be told yet."""
        if self._buffer.startswith(mark):
            self._take(len(mark))
            return True
        open_end = not self._final and mark.startswith(self._buffer)
        return None if open_end else False

    def _show_until(self, *marks: str) -> str | None:
        """Hand on text up to the first mark, which is taken and returned; ``None`` when there is none so far."""
        found = find_mark(self._buffer, marks)
        if found is not None:
            place, mark = found
            self._sink.text(self._take(place))
            self._take(len(mark))
            return mark
        held = 0 if self._final else num_held(self._buffer, marks)
        self._sink.text(self._take(len(self._buffer) - held))
        return None

    def _show_rest(self) -> bool:
        """State: everything from here on is content."""
        self._sink.text(self._take(len(self._buffer)))
        return False
