"""What came of a run: one record per request, and the numbers that describe all of them.

Times are seconds on one clock. A request's clock starts when it is due, not when the client got round to sending it: a
client that falls behind must not flatter the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        due: when it should have been sent.
        sent: when it was.
        token_times: arrival of each event with text; an event may carry several tokens.
        end: when the answer was complete, or failed.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: as the server counts them; without its count, the
            output has as many tokens as events.
        error: what kind of failure, or ``None``.
        message: the failure's words.
    """

    due: float
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def first_token_s(self) -> float:
        """Time to first token (TTFT)."""
        return self.token_times[0] - self.due

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first (TPOT); ``None`` for a single token."""
        if self.num_output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)

    @property
    def total_s(self) -> float:
        """From due to complete."""
        return self.end - self.due

    def gaps_s(self) -> list[float]:
        """Between one event and the next."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits in milliseconds that make a request good; ``None`` does not limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether anything is limited."""
        return not (self.ttft_ms is self.tpot_ms is self.e2e_ms is None)

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request ended well and within all limits."""
        if record.error is not None or not record.token_times:
            return False
        pairs = (
            (self.ttft_ms, record.first_token_s),
            (self.tpot_ms, record.per_token_s or 0.0),
            (self.e2e_ms, record.total_s),
        )
        return all(limit is None or 1e3 * seconds <= limit for limit, seconds in pairs)


def describe(values: Iterable[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, percentiles and maximum, each times ``scale``; ``None`` of nothing."""
    array = scale * np.fromiter(values, dtype=np.float64)
    if not len(array):
        return None
    found = {"mean": float(array.mean())}
    found |= {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)}
    return found | {"max": float(array.max())}


def summarize(records: Sequence[RequestRecord], goal: Goal, duration_s: float) -> dict[str, Any]:
    """The numbers of a run that took ``duration_s``, as plain data."""
    fine = [record for record in records if record.error is None]
    answered = [record for record in fine if record.token_times]
    num_output = sum(record.num_output_tokens for record in fine)
    num_prompt = sum(record.num_prompt_tokens for record in fine)
    summary: dict[str, Any] = {
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_completed": len(fine),
        "num_failed": len(records) - len(fine),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(record.num_cached_tokens for record in fine),
        "num_output_tokens": num_output,
        "requests_per_s": len(fine) / duration_s,
        "output_tokens_per_s": num_output / duration_s,
        "total_tokens_per_s": (num_output + num_prompt) / duration_s,
        "ttft_ms": describe((record.first_token_s for record in answered), 1e3),
        "tpot_ms": describe((s for record in answered if (s := record.per_token_s) is not None), 1e3),
        "gap_ms": describe((gap for record in answered for gap in record.gaps_s()), 1e3),
        "e2e_ms": describe((record.total_s for record in answered), 1e3),
        "send_lag_ms": describe((record.sent - record.due for record in records if record.sent), 1e3),
    }
    if goal.is_set:
        num_good = sum(goal.is_met(record) for record in records)
        summary["goodput"] = {
            "limits_ms": {"ttft": goal.ttft_ms, "tpot": goal.tpot_ms, "e2e": goal.e2e_ms},
            "requests_per_s": num_good / duration_s,
            "share": num_good / len(records) if records else 0.0,
        }
    return summary
