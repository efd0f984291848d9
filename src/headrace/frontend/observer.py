"""Who may watch requests come and go: metrics and traces implement this, the output path calls it.

Each method is called once per event, on the event loop; it must be quick and must not raise.
"""

from __future__ import annotations

from typing import Protocol

from headrace.messages.outputs import RequestTimes, SchedulerStats


class RequestObserver(Protocol):
    """Events of requests by internal id (one per answer of a request with ``n`` > 1); times are `Clock.monotonic`."""

    def request_started(self, request_id: str, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        """A request goes to the core. The prompt counts for the first answer only; the others report 0."""
        ...

    def tokens_arrived(self, request_id: str, num_tokens: int, arrival: float, now: float, num_cached: int) -> None:
        """Tokens came for a request; none of them is kept (``num_tokens`` 0) when it asked for its prompt alone."""
        ...

    def request_finished(self, request_id: str, reason: str, arrival: float, now: float, times: RequestTimes) -> None:
        """A request ended, for whatever reason."""
        ...

    def request_rejected(self, reason: str) -> None:
        """Admission refused a request; ``reason`` is the limit's name."""
        ...

    def stats_arrived(self, stats: SchedulerStats) -> None:
        """The scheduler reported its state."""
        ...


class NullObserver:
    """Watches nothing."""

    def request_started(self, request_id: str, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        """Nothing."""

    def tokens_arrived(self, request_id: str, num_tokens: int, arrival: float, now: float, num_cached: int) -> None:
        """Nothing."""

    def request_finished(self, request_id: str, reason: str, arrival: float, now: float, times: RequestTimes) -> None:
        """Nothing."""

    def request_rejected(self, reason: str) -> None:
        """Nothing."""

    def stats_arrived(self, stats: SchedulerStats) -> None:
        """Nothing."""
