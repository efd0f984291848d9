"""Counters and histograms that cost a fraction of a microsecond and become Prometheus families when scraped.

They belong to one thread (the event loop of the server) and take no lock; that is what makes it possible to update them
for every token. Scraping reads them from the same loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from headrace.observability.buckets import Buckets


class Counter:
    """A total, or one total per value of a label."""

    def __init__(self, name: str, help_text: str, label: str | None = None, values: Iterable[str] = ()) -> None:
        self.name = name
        self.help_text = help_text
        self.label = label
        self.totals: dict[str, float] = dict.fromkeys(values, 0) if label else {"": 0}

    def add(self, amount: float = 1, value: str = "") -> None:
        """Add to the total of a label's value; amounts below 0 are a fault of the caller."""
        assert amount >= 0, (self.name, amount)
        self.totals[value] = self.totals.get(value, 0) + amount

    def family(self, base: dict[str, str]) -> CounterMetricFamily:
        """The Prometheus form, with the labels that all series carry."""
        names = [*base, self.label] if self.label else list(base)
        family = CounterMetricFamily(self.name, self.help_text, labels=names)
        for value, total in self.totals.items():
            family.add_metric([*base.values(), value] if self.label else list(base.values()), total)
        return family


class Histogram(Buckets):
    """Named buckets."""

    __slots__ = ("help_text", "name")

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self.name = name
        self.help_text = help_text

    def family(self, base: dict[str, str]) -> HistogramMetricFamily:
        """The Prometheus form: cumulative buckets."""
        buckets: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*self.bounds, float("inf")], self._counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), running))
        family = HistogramMetricFamily(self.name, self.help_text, labels=list(base))
        family.add_metric(list(base.values()), buckets=buckets, sum_value=self._sum)
        return family


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, … up to ``limit``."""
    bounds: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > limit:
                return bounds
            bounds.append(mantissa * scale)
        scale *= 10
