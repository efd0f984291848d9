"""Counters, histograms and gauges, and the text that scrapers read."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.base.clock import ManualClock
from headrace.control.scheduler.recorder import WaitReason
from headrace.messages.outputs import RequestTimes, SchedulerStats
from headrace.observability.instruments import Histogram, one_two_five
from headrace.observability.metrics import EngineMetrics
from headrace.observability.stats_log import StatsLog

SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
STAYS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BASE = ("model_name", "engine")

# The platform's contract, line by line: labels of gauges and counters, bounds of histograms.
GAUGES: dict[str, tuple[str, ...]] = {
    "num_requests_running": BASE,
    "num_requests_waiting": BASE,
    "num_requests_waiting_by_reason": (*BASE, "reason"),
    "num_requests_kv_fetch_by_stage": (*BASE, "stage"),
    "kv_cache_usage_perc": BASE,
    "engine_sleep_state": (*BASE, "sleep_state"),
    "lora_requests_info": ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    "cache_config_info": (*BASE, "block_size", "num_gpu_blocks"),
}
COUNTERS: dict[str, tuple[str, ...]] = {
    "prompt_tokens": BASE,
    "prompt_tokens_cached": BASE,
    "prompt_tokens_by_source": (*BASE, "source"),
    "generation_tokens": BASE,
    "num_preemptions": BASE,
    "prefix_cache_queries": BASE,
    "prefix_cache_hits": BASE,
    "external_prefix_cache_queries": BASE,
    "external_prefix_cache_hits": BASE,
    "mm_cache_queries": BASE,
    "mm_cache_hits": BASE,
    "corrupted_requests": BASE,
    "request_success": (*BASE, "finished_reason"),
    "admission_rejections": ("model_name", "reason"),
    "watermark_requests": (*BASE, "status"),
}
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "iteration_tokens_total": STEPS,
    "e2e_request_latency_seconds": SECONDS,
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": GAPS,
    "request_time_per_output_token_seconds": GAPS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_inference_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_params_max_tokens": TOKENS,
    "request_num_preemptions": (0, 1, 2, 5, 10, 20),
    "request_prefill_kv_computed_tokens": TOKENS,
    "kv_block_lifetime_seconds": STAYS,
    "kv_block_idle_before_evict_seconds": STAYS,
    "kv_block_reuse_gap_seconds": STAYS,
}
OWN: dict[str, tuple[str, ...]] = {
    "progress_age_seconds": BASE,
    "waiting_reasons": (*BASE, "reason"),
    "step_phase_seconds": (*BASE, "phase"),
    "cause_seconds": (*BASE, "cause"),
    "graph_steps": (*BASE, "mode"),
    "recompute_tokens": BASE,
}
# What belongs to parts that are not there: nothing drafts tokens, nothing transfers KV by NIXL.
ABSENT = ("spec_decode_", "nixl_")
BUSY = SchedulerStats(
    num_running=1,
    waiting_reasons={"no_blocks": 1},
    phase_seconds={"forward": 1.0},
    cause_seconds={"decode": 1.0},
    graph_steps={"FULL": 1},
)


def make_metrics() -> EngineMetrics:
    metrics = EngineMetrics("m", 2048, samples_blocks=True)
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


def test_the_contract_to_the_letter() -> None:
    metrics = make_metrics()
    metrics.stats_arrived(BUSY)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    expected = {f"vllm:{n}": "gauge" for n in GAUGES} | {f"vllm:{n}": "counter" for n in COUNTERS}
    expected |= {f"vllm:{n}": "histogram" for n in HISTOGRAMS}
    assert {n: f.type for n, f in families.items() if n.startswith("vllm:")} == expected
    assert {n for n in families if not n.startswith("vllm:")} == {f"headrace:{n}" for n in OWN}
    labels = {f"vllm:{n}": names for n, names in (GAUGES | COUNTERS).items()}
    labels |= {f"headrace:{n}": names for n, names in OWN.items()} | {f"vllm:{n}": (*BASE, "le") for n in HISTOGRAMS}
    for name, family in families.items():
        series = [s for s in family.samples if not s.name.endswith(("_sum", "_count"))]
        assert series, name
        for sample in series:
            assert sorted(sample.labels) == sorted(labels[name]), name
    for name, bounds in HISTOGRAMS.items():
        told = [s.labels["le"] for s in families[f"vllm:{name}"].samples if s.name.endswith("_bucket")]
        assert [float(le) for le in told] == [*bounds, float("inf")], name
    assert not [name for name in families if name.startswith(tuple(f"vllm:{part}" for part in ABSENT))]


def test_values_of_labels() -> None:
    seen = samples(make_metrics())
    for name, values in {
        "prompt_tokens_by_source_total,source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
        "request_success_total,finished_reason": ("stop", "length", "abort", "error"),
        "num_requests_waiting_by_reason,reason": ("capacity", "deferred"),
        "num_requests_kv_fetch_by_stage,stage": ("waiting_to_start", "in_progress", "completed_waiting"),
        "engine_sleep_state,sleep_state": ("awake", "weights_offloaded", "discard_all"),
    }.items():
        assert {key for key in seen if key.startswith(f"vllm:{name}=")} == {f"vllm:{name}={v}" for v in values}


def test_every_reason_to_wait_has_a_series() -> None:
    reasons = {r.value for r in WaitReason} | {"next_step"}
    assert {key for key in samples(make_metrics()) if key.startswith("headrace:waiting_reasons")} == {
        f"headrace:waiting_reasons,reason={reason}" for reason in reasons
    }


def test_lifetimes_of_blocks_are_told_only_when_sampled() -> None:
    text = EngineMetrics("m", 2048).render().decode()
    assert "kv_block" not in text


def test_sleep_adapters_and_connector() -> None:
    metrics = make_metrics()
    assert samples(metrics)["vllm:engine_sleep_state,sleep_state=awake"] == 1
    before = time.time()
    metrics.stats_arrived(
        SchedulerStats(
            sleep_level=2,
            running_adapters=["poet", "sage"],
            external_queries=10,
            external_hits=4,
            num_corrupted=1,
            num_watermark_held=3,
            histograms={"step_tokens": ([0] * 13 + [2], 50000.0), "kv_block_lifetime": ([1] + [0] * 21, 0.0005)},
        )
    )
    seen = samples(metrics)
    assert seen["vllm:engine_sleep_state,sleep_state=awake"] == 0
    assert seen["vllm:engine_sleep_state,sleep_state=discard_all"] == 1
    adapters = "max_lora=0,running_lora_adapters=poet,sage,waiting_lora_adapters="
    assert before <= seen[f"vllm:lora_requests_info,{adapters}"] <= time.time()
    assert seen["vllm:external_prefix_cache_hits_total"] == 4
    assert seen["vllm:corrupted_requests_total"] == 1
    assert seen["vllm:watermark_requests_total,status=held"] == 3
    assert seen["vllm:iteration_tokens_total_count"] == 2 and seen["vllm:iteration_tokens_total_sum"] == 50000
    assert seen["vllm:kv_block_lifetime_seconds_count"] == 1


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
        SchedulerStats(num_running=2, num_waiting=3, kv_cache_usage=0.25, waiting_reasons={"grammar": 1})
    )
    seen = samples(metrics)
    assert seen["vllm:num_requests_running"] == 2
    assert seen["vllm:num_requests_waiting_by_reason,reason=capacity"] == 2
    assert seen["vllm:num_requests_waiting_by_reason,reason=deferred"] == 1
    assert seen["vllm:kv_cache_usage_perc"] == 0.25
    metrics.stats_arrived(SchedulerStats())
    assert samples(metrics)["vllm:num_requests_running"] == 0
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
