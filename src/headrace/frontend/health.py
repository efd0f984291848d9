"""Whether work advances, from two readings of the core's progress word."""

from __future__ import annotations

from headrace.base.errors import EngineDeadError

HUNG_AFTER_S = 5.0
GIVE_UP_AFTER_S = 9.0
"""When requests that have not begun stop waiting for a core that does not move."""


class ProgressWatch:
    """Remembers when the word last moved or nothing was to be done.

    Args:
        now: `Clock.monotonic` at the start.
    """

    def __init__(self, now: float) -> None:
        self._word: int | None = None
        self._moved_at = now

    def observe(self, word: int, pending: bool, now: float) -> None:
        """Take a reading; ``pending`` says whether any request is unfinished."""
        if word != self._word or not pending:
            self._word = word
            self._moved_at = now

    def restart(self, now: float) -> None:
        """Forget what came before."""
        self._moved_at = now

    def age_s(self, now: float) -> float:
        """Seconds for which there was work and nothing moved."""
        return now - self._moved_at


def check_moves(age_s: float) -> None:
    """Raise `EngineDeadError` when there has been work for ``age_s`` seconds and nothing moved for too long."""
    if age_s > HUNG_AFTER_S:
        raise EngineDeadError(f"the engine has work but has not moved for {age_s:.0f} s; restart it if this stays")
