"""Counts per bucket, and the bounds that the platforms' dashboards know.

Free of imports, so that the core may count too; `instruments` makes Prometheus families of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_MINUTES = (60, 120, 300, 600, 1200, 1800)
RESIDENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, *_MINUTES)


class Buckets:
    """Counts per bucket; ``bounds`` are the upper ends, ascending, without infinity."""

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Sum of values."""
        return self._sum

    def dump(self) -> tuple[list[int], float]:
        """The counts and the sum, as they travel in a message."""
        return list(self._counts), self._sum

    def load(self, dumped: tuple[list[int], float]) -> None:
        """Take what another one with the same bounds dumped, in place of everything counted here."""
        counts, total = dumped
        assert len(counts) == len(self._counts), (len(counts), len(self._counts))
        self._counts, self._sum = list(counts), total

    def quantile(self, share: float, before: list[int] | None = None) -> float | None:
        """The value below which a share of all lies, spread evenly within its bucket; ``None`` when there is none.

        Args:
            share: 0 to 1.
            before: counts of an earlier `dump`; only what came since then is looked at.
        """
        counts = self._counts if before is None else [n - b for n, b in zip(self._counts, before, strict=True)]
        wanted = share * sum(counts)
        if not wanted:
            return None
        running, low = 0.0, 0.0
        for bound, count in zip(self.bounds, counts, strict=False):
            if count and running + count >= wanted:
                return low + (bound - low) * max(0.0, wanted - running) / count
            running += count
            low = bound
        return low
