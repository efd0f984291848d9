"""Arrival processes, prompts and statistics: pure functions of a seed and of records."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.entrypoints.bench import report
from headrace.entrypoints.bench.arrivals import burst_arrivals, poisson_arrivals
from headrace.entrypoints.bench.prompts import PromptShape, make_texts, make_token_ids, spread_lengths
from headrace.entrypoints.bench.serve import parse_goal
from headrace.entrypoints.bench.statistics import Goal, RequestRecord, describe, summarize


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_users() -> None:
    times = poisson_arrivals(4000, 5.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0.0 and times == sorted(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert times == poisson_arrivals(4000, 5.0, seed=1) != poisson_arrivals(4000, 5.0, seed=2)


def test_bursts_come_together_at_the_same_mean_rate() -> None:
    assert burst_arrivals(7, 2.0, 3) == [0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 3.0]


def test_prompts_follow_seed_and_shape() -> None:
    shape = PromptShape(num_tokens=20, spread=0.5, prefix_tokens=7, num_prefixes=2)
    prompts = make_token_ids(50, shape, 3, vocab_size=5000)
    assert prompts == make_token_ids(50, shape, 3, vocab_size=5000) != make_token_ids(50, shape, 4, vocab_size=5000)
    assert {tuple(p[:7]) for p in prompts[::2]} == {tuple(prompts[0][:7])} != {tuple(prompts[1][:7])}
    assert all(17 <= len(p) <= 37 for p in prompts) and len({len(p) for p in prompts}) > 5
    assert all(1000 <= t < 5000 for p in prompts for t in p)
    assert all(0 <= t < 300 for p in make_token_ids(5, shape, 3, vocab_size=300) for t in p)
    texts = make_texts(4, PromptShape(12), 0)
    assert [len(text.split()) for text in texts] == [12] * 4 and len(set(texts)) == 4
    assert spread_lengths(3, 1, 0.9, 0) == [1, 1, 1] or min(spread_lengths(3, 1, 0.9, 0)) >= 1


def record(due: float, *times: float, tokens: int | None = None, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        due=due,
        sent=due + 0.001,
        token_times=list(times),
        end=times[-1] if times else due,
        num_prompt_tokens=10,
        num_output_tokens=len(times) if tokens is None else tokens,
        error=error,
    )


def test_times_of_one_request() -> None:
    one = record(1.0, 1.5, 1.6, 1.9, tokens=5)
    assert one.first_token_s == pytest.approx(0.5)
    assert one.per_token_s == pytest.approx(0.1)
    assert one.gaps_s() == pytest.approx([0.1, 0.3])
    assert one.total_s == pytest.approx(0.9)
    assert record(0.0, 1.0).per_token_s is None


def test_summary_of_several() -> None:
    records = [record(0.0, 0.1, 0.2, 0.3), record(0.0, 0.5, 0.6), record(1.0, error="HTTP 429"), record(1.0, 1.2)]
    summary = summarize(records, Goal(ttft_ms=300.0, tpot_ms=150.0), 2.0)
    assert (summary["num_completed"], summary["num_failed"], summary["errors"]) == (3, 1, {"HTTP 429": 1})
    assert summary["num_output_tokens"] == 6 and summary["output_tokens_per_s"] == 3.0
    assert summary["requests_per_s"] == 1.5 and summary["total_tokens_per_s"] == 18.0
    assert summary["ttft_ms"]["p50"] == pytest.approx(200.0) and summary["ttft_ms"]["max"] == pytest.approx(500.0)
    assert summary["gap_ms"]["p99"] == pytest.approx(100.0)
    assert summary["goodput"]["requests_per_s"] == 1.0 and summary["goodput"]["share"] == 0.5
    table = report.as_table(summary)
    assert "3 requests completed, 1 failed" in table and "1 x HTTP 429" in table and "50.0% of all" in table
    assert "goodput" not in summarize(records, Goal(), 2.0)
    nothing = summarize([record(0.0, error="timeout")], Goal(), 1.0)
    assert nothing["ttft_ms"] is None and "timeout" in report.as_table(nothing)


def test_percentiles() -> None:
    found = describe([i / 1000 for i in range(101)], 1e3)
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0})
    assert describe([]) is None


def test_goals_are_read_or_refused() -> None:
    assert parse_goal(["ttft:500", "tpot:50.5"]) == Goal(ttft_ms=500.0, tpot_ms=50.5)
    assert not parse_goal([]).is_set
    for word in ("ttft", "speed:3", "tpot:-1", "e2e:x"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goal([word])


def test_gaps_are_between_events() -> None:
    times = [0.5, 0.75, 1.5]
    assert record(0.0, *times).gaps_s() == [b - a for a, b in pairwise(times)]
