"""How much may queue: refuse early, with a time after which trying again makes sense.

Counts are conservative and cheap: a request counts as queued from its registration to its first token, as far as
the engine's running limit or the scheduler's last report say that somebody must wait; its whole prompt counts for
as long. Knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import InvalidRequestError, QueueFullError
from headrace.config.sections import SchedulerSection

_LONGEST_WAIT_S = 60.0
_SMOOTHING = 0.1


@dataclass(slots=True)
class QueueState:
    """What is in the engine now: answers that live, those without a token, their prompt tokens, reported waiting."""

    num_requests: int = 0
    num_unstarted: int = 0
    num_unstarted_tokens: int = 0
    num_waiting: int = 0


class Admission:
    """Compares the queue with the operator's limits; without limits everything passes."""

    def __init__(self, section: SchedulerSection) -> None:
        self._max_reqs = section.max_num_queued_reqs
        self._max_tokens = section.max_num_queued_tokens
        self._max_running = section.max_num_seqs
        self._mean_gap_s: float | None = None
        self._since: float | None = None

    def note_busy(self, now: float) -> None:
        """There is work; time without any says nothing about how fast the queue moves."""
        if self._since is None:
            self._since = now

    def note_finished(self, count: int, now: float, *, idle: bool) -> None:
        """Learn from ``count`` requests that ended by ``now`` how fast the queue moves; ``idle``: none are left."""
        if self._since is not None and count:
            gap = (now - self._since) / count
            self._mean_gap_s = (
                gap if self._mean_gap_s is None else self._mean_gap_s + _SMOOTHING * (gap - self._mean_gap_s)
            )
        if idle:
            self._since = None
        elif count:
            self._since = now

    def check(self, state: QueueState, num_new: int, num_new_tokens: int) -> None:
        """Raise if ``num_new`` more requests with so many prompt tokens would pass a limit.

        Raises:
            InvalidRequestError: so many answers would not fit into an empty queue either.
            QueueFullError: named after the limit.
        """
        if self._max_reqs is not None and num_new > self._max_running + self._max_reqs:
            most = self._max_running + self._max_reqs
            message = f"n times the number of prompts must not exceed {most}, what this server runs and queues"
            raise InvalidRequestError(message, param="n")
        crowded = max(state.num_waiting, state.num_requests + num_new - self._max_running)
        queued = min(state.num_unstarted + num_new, crowded)
        if self._max_reqs is not None and queued > self._max_reqs:
            raise self._full("max_num_queued_reqs", queued - self._max_reqs)
        tokens = state.num_unstarted_tokens + num_new_tokens
        if self._max_tokens is not None and state.num_unstarted and tokens > self._max_tokens:
            mean_tokens = state.num_unstarted_tokens / state.num_unstarted
            raise self._full("max_num_queued_tokens", (tokens - self._max_tokens) / max(1.0, mean_tokens))

    def _full(self, limit: str, excess: float) -> QueueFullError:
        """The refusal; ``excess`` requests must end before another try makes sense."""
        wait = min(max(1.0, excess * (self._mean_gap_s or 0.0)), _LONGEST_WAIT_S)
        return QueueFullError(f"the engine is busy: its queue has reached {limit}", retry_after_s=wait, limit=limit)
