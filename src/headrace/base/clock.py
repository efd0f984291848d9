"""Time as an argument.

Everything above this floor takes a `Clock` in its constructor; only the composition roots choose `SystemClock`.
The simulator and the tests pass `ManualClock`, so that one seed gives one trace.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; comparable between processes of one machine."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people and for metrics."""
        ...


class SystemClock:
    """The machine's clocks (``CLOCK_MONOTONIC`` is shared by all processes of a Linux machine)."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds`` (at least 0)."""
        assert seconds >= 0, seconds
        self._now += seconds
