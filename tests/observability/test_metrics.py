"""Counters, histograms and gauges, and the text that scrapers read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.base.clock import ManualClock
from headrace.messages.outputs import RequestTimes, SchedulerStats
from headrace.observability.instruments import Histogram, one_two_five
from headrace.observability.metrics import EngineMetrics
from headrace.observability.stats_log import StatsLog

# What routers and dashboards read, by Prometheus type.
PROMISED = {
    "gauge": [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:num_requests_kv_fetch_by_stage",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    ],
    "counter": [
        "vllm:prompt_tokens",
        "vllm:prompt_tokens_by_source",
        "vllm:prompt_tokens_cached",
        "vllm:generation_tokens",
        "vllm:num_preemptions",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:request_success",
        "vllm:admission_rejections",
    ],
    "histogram": [
        "vllm:iteration_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
        "vllm:request_num_preemptions",
        "vllm:request_prefill_kv_computed_tokens",
    ],
}


def make_metrics() -> EngineMetrics:
    metrics = EngineMetrics("m", 2048)
    metrics.attach({"block_size": 16, "num_gpu_blocks": 10}, lambda: 0.5)
    return metrics


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """Values by name, with every label but the two that all series have."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine")]
            found[",".join([sample.name, *labels])] = sample.value
    return found


def test_names_and_types() -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(make_metrics().render().decode())}
    for kind, names in PROMISED.items():
        for name in names:
            assert kinds[name] == kind, name
    assert not [name for name in kinds if not name.startswith(("vllm:", "headrace:"))]


def test_every_series_has_the_base_labels() -> None:
    for family in text_string_to_metric_families(make_metrics().render().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            assert sample.labels["engine"] == "0"


def test_a_request() -> None:
    metrics = make_metrics()
    metrics.request_started("a", 40, 1, 100)
    metrics.tokens_arrived("a", 1, 10.0, 10.5, 16)
    metrics.tokens_arrived("a", 2, 10.0, 10.7, 16)
    times = RequestTimes(
        arrival=10.0, queued=10.0, first_scheduled=10.2, first_token=10.5, last_token=10.7, num_preemptions=1
    )
    metrics.request_finished("a", "stop", 10.0, 11.0, times)
    metrics.request_finished("a", "abort", 10.0, 12.0, times)
    seen = samples(metrics)
    assert seen["vllm:prompt_tokens_total"] == 40
    assert seen["vllm:prompt_tokens_cached_total"] == 16
    assert seen["vllm:prompt_tokens_by_source_total,source=local_compute"] == 24
    assert seen["vllm:generation_tokens_total"] == 3
    assert seen["vllm:request_success_total,finished_reason=stop"] == 1
    assert seen["vllm:request_success_total,finished_reason=abort"] == 0
    assert seen["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert seen["vllm:inter_token_latency_seconds_count"] == 2
    assert abs(seen["vllm:inter_token_latency_seconds_sum"] - 0.2) < 1e-9
    assert abs(seen["vllm:request_queue_time_seconds_sum"] - 0.2) < 1e-9
    assert abs(seen["vllm:request_prefill_time_seconds_sum"] - 0.3) < 1e-9
    assert seen["vllm:e2e_request_latency_seconds_sum"] == 1.0
    assert seen["vllm:request_num_preemptions_sum"] == 1


def test_several_answers_count_their_prompt_once() -> None:
    metrics = make_metrics()
    for index in range(3):
        metrics.request_started(str(index), 0 if index else 7, 3, 5)
        metrics.tokens_arrived(str(index), 1, 0.0, 1.0, 0)
        metrics.request_finished(str(index), "length", 0.0, 2.0, RequestTimes())
    seen = samples(metrics)
    assert seen["vllm:prompt_tokens_total"] == 7
    assert seen["vllm:generation_tokens_total"] == 3
    assert seen["vllm:request_params_n_sum"] == 3
    assert seen["vllm:request_prompt_tokens_count"] == 1
    assert seen["vllm:request_success_total,finished_reason=length"] == 3


def test_a_request_for_its_prompt_alone() -> None:
    metrics = make_metrics()
    metrics.request_started("a", 40, 1, 0)
    metrics.tokens_arrived("a", 0, 10.0, 10.5, 16)
    metrics.request_finished("a", "length", 10.0, 11.0, RequestTimes())
    seen = samples(metrics)
    assert seen["vllm:prompt_tokens_total"] == 40 and seen["vllm:prompt_tokens_cached_total"] == 16
    assert seen["vllm:generation_tokens_total"] == seen["vllm:time_to_first_token_seconds_count"] == 0


def test_an_abort_before_the_first_token() -> None:
    metrics = make_metrics()
    metrics.request_started("a", 40, 1, None)
    metrics.request_finished("a", "abort", 0.0, 1.0, RequestTimes())
    seen = samples(metrics)
    assert seen["vllm:request_success_total,finished_reason=abort"] == 1
    assert seen["vllm:prompt_tokens_total"] == 0
    assert seen["vllm:request_queue_time_seconds_count"] == 0
    metrics.tokens_arrived("a", 5, 0.0, 2.0, 0)
    assert samples(metrics)["vllm:generation_tokens_total"] == 0


def test_gauges_follow_the_scheduler() -> None:
    metrics = make_metrics()
    metrics.stats_arrived(
        SchedulerStats(
            num_running=2, num_waiting=3, kv_cache_usage=0.25, prompt_tokens=10, waiting_reasons={"grammar": 1}
        )
    )
    seen = samples(metrics)
    assert seen["vllm:num_requests_running"] == 2
    assert seen["vllm:num_requests_waiting_by_reason,reason=capacity"] == 2
    assert seen["vllm:num_requests_waiting_by_reason,reason=deferred"] == 1
    assert seen["vllm:kv_cache_usage_perc"] == 0.25
    assert seen["vllm:iteration_tokens_total_sum"] == 10
    metrics.stats_arrived(SchedulerStats(prompt_tokens=10))
    assert samples(metrics)["vllm:num_requests_running"] == 0
    assert samples(metrics)["vllm:iteration_tokens_total_count"] == 1
    assert samples(metrics)["vllm:cache_config_info,block_size=16,num_gpu_blocks=10"] == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=30))
def test_histograms_count_cumulatively(values: list[tuple[float, int]]) -> None:
    histogram = Histogram("h", "help", (1.0, 10.0, 50.0))
    for value, times in values:
        histogram.observe(value, times)
    sample_values = {s.labels.get("le"): s.value for s in histogram.family({"a": "b"}).samples if "bucket" in s.name}
    for bound in (1.0, 10.0, 50.0):
        assert sample_values[str(bound)] == sum(times for value, times in values if value <= bound)
    assert sample_values["+Inf"] == histogram.count == sum(times for _, times in values)


def test_token_bounds() -> None:
    assert one_two_five(50) == [1, 2, 5, 10, 20, 50]
    assert one_two_five(49) == [1, 2, 5, 10, 20]


def test_stats_line() -> None:
    clock = ManualClock()
    metrics = make_metrics()
    log = StatsLog(metrics, clock)
    assert log.line() is None
    metrics.request_started("a", 40, 1, None)
    metrics.tokens_arrived("a", 20, 0.0, 1.0, 10)
    metrics.stats_arrived(SchedulerStats(num_running=1, kv_cache_usage=0.5, prefix_queries=40, prefix_hits=10))
    clock.advance(10)
    line = log.line()
    assert line is not None
    assert "prompt 3.0 tokens/s, generation 2.0 tokens/s, running 1, waiting 0" in line
    assert "50.0 % used, prefix hits 25.0 %" in line
    metrics.stats_arrived(SchedulerStats(prefix_queries=40, prefix_hits=10))
    clock.advance(10)
    assert "running 0" in (log.line() or "")
    assert log.line() is None


def test_where_time_went() -> None:
    metrics = make_metrics()
    metrics.stats_arrived(
        SchedulerStats(
            phase_seconds={"forward": 1.5},
            cause_seconds={"waiting_no_blocks": 2.0},
            graph_steps={"FULL": 7},
            num_waiting=3,
            waiting_reasons={"no_blocks": 1, "remote_kvs": 2},
        )
    )
    seen = samples(metrics)
    assert seen["headrace:step_phase_seconds_total,phase=forward"] == 1.5
    assert seen["headrace:cause_seconds_total,cause=waiting_no_blocks"] == 2.0
    assert seen["headrace:graph_steps_total,mode=FULL"] == 7
    assert seen["vllm:num_requests_waiting_by_reason,reason=capacity"] == 1
    assert seen["vllm:num_requests_waiting_by_reason,reason=deferred"] == 2
