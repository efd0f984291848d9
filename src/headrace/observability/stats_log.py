"""A line every few seconds while the engine is busy: throughput in and out, running, waiting, KV use, hit rate.

Reads the same counters as `/metrics`, so that the two never differ. Silent when idle, after one last line.
"""

from __future__ import annotations

import asyncio

from headrace.base.clock import Clock
from headrace.base.logging import get_logger
from headrace.messages.outputs import SchedulerStats
from headrace.observability.metrics import EngineMetrics

logger = get_logger(__name__)


class StatsLog:
    """Turns two readings of the totals into a line.

    Args:
        metrics: the counters.
        clock: time between readings.
    """

    def __init__(self, metrics: EngineMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._then = clock.monotonic()
        self._prompt = self._generated = 0.0
        self._queries = self._hits = 0
        self._was_busy = False

    def line(self) -> str | None:
        """The line for the time since the last call, or ``None`` when nothing happened."""
        now = self._clock.monotonic()
        elapsed = max(now - self._then, 1e-9)
        stats = self._metrics.stats
        prompt = self._metrics.prompt_by_source.totals["local_compute"]
        generated = self._metrics.generation_tokens.totals[""]
        new_prompt, new_generated = prompt - self._prompt, generated - self._generated
        busy = bool(new_prompt or new_generated or stats.num_running or stats.num_waiting)
        rate = self._hit_rate(stats)
        self._then, self._prompt, self._generated = now, prompt, generated
        was_busy, self._was_busy = self._was_busy, busy
        if not busy and not was_busy:
            return None
        return (
            f"prompt {new_prompt / elapsed:.1f} tokens/s, generation {new_generated / elapsed:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"KV cache {100 * stats.kv_cache_usage:.1f} % used, prefix hits {rate}"
        )

    def _hit_rate(self, stats: SchedulerStats) -> str:
        queries, hits = stats.prefix_queries - self._queries, stats.prefix_hits - self._hits
        self._queries, self._hits = stats.prefix_queries, stats.prefix_hits
        return f"{100 * hits / queries:.1f} %" if queries > 0 else "none"

    async def run(self, interval_s: float) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            if (text := self.line()) is not None:
                logger.info("%s", text)
