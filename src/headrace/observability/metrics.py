"""The engine's metrics, under the names that routers and dashboards scrape.

Owns the counters and histograms of one engine. Gauges show the scheduler's latest report, which it sends after every
step and whenever its state changes without one. Counters move in the calls of the output path, each made once per
event; they therefore equal the sums of the clients' own ``usage``. Knows nothing of HTTP; `render` gives the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from headrace.messages.outputs import RequestTimes, SchedulerStats
from headrace.observability.buckets import RESIDENCY_S, STEP_TOKENS
from headrace.observability.explain import CAUSES
from headrace.observability.instruments import Counter, Histogram, one_two_five

CONTENT_TYPE: str = CONTENT_TYPE_LATEST

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT = (*_SHORT, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_LATENCY = (*_SECONDS, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_SMALL = (1, 2, 5, 10, 20)
_REASONS = ("stop", "length", "abort", "error")
_WAITING = "waiting_"
_WAITING_REASONS = [cause.removeprefix(_WAITING) for cause in CAUSES if cause.startswith(_WAITING)]
# Causes of waiting that more capacity would not cure at once; everything else counts as a lack of capacity.
_DEFERRED = frozenset({"grammar", "remote_kvs", "external_hit", "steps_in_flight", "drain"})


@dataclass(slots=True)
class _Flow:
    """A request in flight, as far as gaps between its tokens are concerned."""

    num_prompt_tokens: int
    max_tokens: int | None
    started: bool = False
    last_token_time: float = 0.0
    num_tokens: int = 0


class EngineMetrics(Collector):
    """Counters, histograms and gauges of one engine.

    Args:
        model_name: the label ``model_name``.
        max_model_len: upper end of the token buckets.
        samples_blocks: whether the core measures the lifetimes of KV blocks.
    """

    def __init__(self, model_name: str, max_model_len: int, *, samples_blocks: bool = False) -> None:
        self._base = {"model_name": model_name, "engine": "0"}
        # Refusals happen before an engine is chosen.
        self._model_only = {"model_name": model_name}
        self._cache_info: dict[str, str] = {}
        self._progress_age: Callable[[], float] = lambda: 0.0
        self.stats = SchedulerStats()
        self._shipped = _make_shipped(samples_blocks)
        self._flows: dict[str, _Flow] = {}
        self._make_counters()
        self._make_histograms(one_two_five(max_model_len))
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def attach(self, cache: dict[str, Any], progress_age: Callable[[], float]) -> None:
        """Add what is known once the engine is ready.

        Args:
            cache: labels of ``cache_config_info``; values are written as text.
            progress_age: gives the seconds for which pending work has stood still.
        """
        self._cache_info = {name: str(value) for name, value in cache.items()}
        self._progress_age = progress_age

    def _make_counters(self) -> None:
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of requests that gave their first token.")
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self.prompt_by_source = Counter("vllm:prompt_tokens_by_source", "Where they came from.", "source", sources)
        self.prompt_cached = Counter("vllm:prompt_tokens_cached", "Prompt tokens that a cache gave.")
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens generated.")
        self.success = Counter("vllm:request_success", "Requests ended, by reason.", "finished_reason", _REASONS)
        reasons = ("max_num_queued_reqs", "max_num_queued_tokens")
        self.rejections = Counter("vllm:admission_rejections", "Requests refused by a full queue.", "reason", reasons)

    def _make_histograms(self, token_bounds: list[float]) -> None:
        make = Histogram
        self.ttft = make("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.gap = make("vllm:inter_token_latency_seconds", "Between two tokens of a request.", _GAP)
        self.per_token = make("vllm:request_time_per_output_token_seconds", "Mean gap of a request.", _GAP)
        self.e2e = make("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self.queue = make("vllm:request_queue_time_seconds", "From arrival to the first step.", _LATENCY)
        self.inference = make("vllm:request_inference_time_seconds", "From the first step to the end.", _LATENCY)
        self.prefill = make("vllm:request_prefill_time_seconds", "From the first step to the first token.", _LATENCY)
        self.decode = make("vllm:request_decode_time_seconds", "From the first token to the last.", _LATENCY)
        self.req_prompt = make("vllm:request_prompt_tokens", "Prompt tokens of a request.", token_bounds)
        self.req_generation = make("vllm:request_generation_tokens", "Tokens generated for a request.", token_bounds)
        self.req_computed = make("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed.", token_bounds)
        self.req_most = make(
            "vllm:request_max_num_generation_tokens", "Most tokens generated for an answer of a request.", token_bounds
        )
        self.req_max = make("vllm:request_params_max_tokens", "max_tokens of a request.", token_bounds)
        self.req_n = make("vllm:request_params_n", "n of a request.", _SMALL)
        self.req_preempted = make("vllm:request_num_preemptions", "Preemptions of a request.", (0, 1, 2, 5, 10, 20))

    # The output path calls these, on the event loop.

    def request_started(self, request_id: str, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        """A request was sent to the core; of ``n`` answers to one prompt only the first has ``num_prompt_tokens``."""
        self._flows[request_id] = _Flow(num_prompt_tokens, max_tokens)
        if num_prompt_tokens:
            self.req_n.observe(n)

    def tokens_arrived(self, request_id: str, num_tokens: int, arrival: float, now: float, num_cached: int) -> None:
        """Tokens of a request arrived at ``now``; the first ones also count its prompt.

        Args:
            request_id: as in `request_started`; unknown ids are ignored.
            num_tokens: kept tokens, those past a stop not included; 0 for a request that is run for its prompt alone.
            arrival: when the request arrived.
            now: `Clock.monotonic`.
            num_cached: prompt tokens that the prefix cache gave.
        """
        flow = self._flows.get(request_id)
        if flow is None:
            return
        if not flow.started:
            flow.started = True
            self._count_prompt(flow.num_prompt_tokens, num_cached)
            if num_tokens:
                self.ttft.observe(max(0.0, now - arrival))
        elif num_tokens:
            self.gap.observe((now - flow.last_token_time) / num_tokens, num_tokens)
        flow.num_tokens += num_tokens
        flow.last_token_time = now
        self.generation_tokens.totals[""] += num_tokens

    def _count_prompt(self, num_prompt_tokens: int, num_cached: int) -> None:
        if num_prompt_tokens == 0:
            return
        self.prompt_tokens.add(num_prompt_tokens)
        self.prompt_cached.add(num_cached)
        self.prompt_by_source.add(num_cached, "local_cache_hit")
        self.prompt_by_source.add(num_prompt_tokens - num_cached, "local_compute")
        self.req_computed.observe(num_prompt_tokens - num_cached)

    def request_finished(self, request_id: str, reason: str, arrival: float, now: float, times: RequestTimes) -> None:
        """A request ended, for whatever reason; a second call for it does nothing.

        Args:
            request_id: as in `request_started`.
            reason: ``stop``, ``length``, ``abort`` or ``error``.
            arrival: when it arrived.
            now: `Clock.monotonic`.
            times: the core's milestones, zeros where it has none.
        """
        flow = self._flows.pop(request_id, None)
        if flow is None:
            return
        self.success.add(1, reason)
        self.e2e.observe(max(0.0, now - arrival))
        if flow.num_prompt_tokens:
            self.req_prompt.observe(flow.num_prompt_tokens)
        self.req_generation.observe(flow.num_tokens)
        self.req_most.observe(flow.num_tokens)
        if flow.max_tokens is not None:
            self.req_max.observe(flow.max_tokens)
        self.req_preempted.observe(times.num_preemptions)
        if not times.first_scheduled:
            return
        self.queue.observe(max(0.0, times.first_scheduled - (times.queued or arrival)))
        if times.first_token:
            decode = max(0.0, times.last_token - times.first_token)
            self.prefill.observe(max(0.0, times.first_token - times.first_scheduled))
            self.decode.observe(decode)
            self.inference.observe(max(0.0, times.last_token - times.first_scheduled))
            if flow.num_tokens > 1:
                self.per_token.observe(decode / (flow.num_tokens - 1))

    def num_generated(self, request_id: str) -> int:
        """Tokens that a live request has given so far; 0 for any other."""
        flow = self._flows.get(request_id)
        return flow.num_tokens if flow is not None else 0

    def request_rejected(self, reason: str) -> None:
        """A full queue refused a request; ``reason`` is the name of the limit."""
        self.rejections.add(1, reason)

    def stats_arrived(self, stats: SchedulerStats) -> None:
        """The core reported its state."""
        self.stats = stats
        for name, dumped in stats.histograms.items():
            if name in self._shipped:
                self._shipped[name].load(dumped)

    # Scraping.

    def collect(self) -> Iterator[Metric]:
        """All families, gauges read now."""
        yield from self._gauges()
        for value in [*vars(self).values(), *self._shipped.values()]:
            if isinstance(value, (Counter, Histogram)):
                yield value.family(self._base if value is not self.rejections else self._model_only)

    def _gauges(self) -> Iterator[Metric]:
        stats = self.stats
        yield self._gauge("vllm:num_requests_running", "Requests that run.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting)
        yield self._waiting_by_reason(stats)
        yield self._fetch_by_stage(stats)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage)
        yield self._sleep_state(stats)
        yield _adapters(stats)
        yield self._gauge("headrace:progress_age_seconds", "Age of the core's last progress.", self._progress_age())
        info = GaugeMetricFamily("vllm:cache_config_info", "KV cache.", labels=[*self._base, *self._cache_info])
        info.add_metric([*self._base.values(), *self._cache_info.values()], 1)
        yield info
        waiting = GaugeMetricFamily("headrace:waiting_reasons", "Why requests wait.", labels=[*self._base, "reason"])
        for reason, count in (dict.fromkeys(_WAITING_REASONS, 0) | stats.waiting_reasons).items():
            waiting.add_metric([*self._base.values(), reason], count)
        yield waiting
        watermark = {"admitted": stats.num_watermark_admitted, "held": stats.num_watermark_held}
        for name, help_text, label, values in (
            ("headrace:step_phase_seconds", "Time of steps by phase.", "phase", stats.phase_seconds),
            ("headrace:cause_seconds", "Time of requests by what it went to.", "cause", stats.cause_seconds),
            ("headrace:graph_steps", "Steps by graph mode.", "mode", stats.graph_steps),
            ("vllm:watermark_requests", "Requests that met the watermark of free blocks.", "status", watermark),
        ):
            labelled = Counter(name, help_text, label)
            for value, amount in values.items():
                labelled.add(amount, value)
            yield labelled.family(self._base)
        for name, help_text, total in (
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hits),
            ("vllm:external_prefix_cache_queries", "Prompt tokens asked of a connector.", stats.external_queries),
            ("vllm:external_prefix_cache_hits", "Prompt tokens that a connector had.", stats.external_hits),
            # No model with media is served: nothing asks that cache.
            ("vllm:mm_cache_queries", "Media items looked up.", 0),
            ("vllm:mm_cache_hits", "Media items found.", 0),
            ("vllm:corrupted_requests", "Requests whose logits were not finite.", stats.num_corrupted),
            ("headrace:recompute_tokens", "Tokens computed again after preemptions.", stats.recompute_tokens),
        ):
            counter = Counter(name, help_text)
            counter.add(total)
            yield counter.family(self._base)

    def _sleep_state(self, stats: SchedulerStats) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state that the engine is in.", labels=[*self._base, "sleep_state"]
        )
        for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            family.add_metric([*self._base.values(), state], float(stats.sleep_level == level))
        return family

    def _waiting_by_reason(self, stats: SchedulerStats) -> Metric:
        deferred = sum(count for reason, count in stats.waiting_reasons.items() if reason in _DEFERRED)
        name, labels = "vllm:num_requests_waiting_by_reason", [*self._base, "reason"]
        family = GaugeMetricFamily(name, "Waiting for room, or for something else first.", labels=labels)
        family.add_metric([*self._base.values(), "capacity"], max(0, stats.num_waiting - deferred))
        family.add_metric([*self._base.values(), "deferred"], deferred)
        return family

    def _fetch_by_stage(self, stats: SchedulerStats) -> Metric:
        reasons = stats.waiting_reasons
        stages = {"waiting_to_start": reasons.get("external_hit", 0), "in_progress": reasons.get("remote_kvs", 0)}
        name, labels = "vllm:num_requests_kv_fetch_by_stage", [*self._base, "stage"]
        family = GaugeMetricFamily(name, "Requests that wait for KV from elsewhere.", labels=labels)
        for stage, count in (stages | {"completed_waiting": 0}).items():
            family.add_metric([*self._base.values(), stage], count)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=list(self._base))
        family.add_metric(list(self._base.values()), value)
        return family

    def render(self) -> bytes:
        """The Prometheus text."""
        return generate_latest(self.registry)


def _make_shipped(samples_blocks: bool) -> dict[str, Histogram]:
    """Histograms that the core counts itself, by the names in its statistics."""
    made = {"step_tokens": Histogram("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)}
    if samples_blocks:
        for name, text in (
            ("kv_block_lifetime", "From when a block could be found until it was evicted."),
            ("kv_block_idle_before_evict", "From the last use of a block until it was evicted."),
            ("kv_block_reuse_gap", "Between two uses of a block."),
        ):
            made[name] = Histogram(f"vllm:{name}_seconds", text, RESIDENCY_S)
    return made


def _adapters(stats: SchedulerStats) -> Metric:
    """Adapters in use; routers take the series with the newest time as its value."""
    names = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
    family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of requests; the value is the time.", labels=names)
    family.add_metric(["0", ",".join(stats.waiting_adapters), ",".join(stats.running_adapters)], time.time())
    return family
