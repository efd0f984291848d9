"""Streams and prompts side by side, in virtual time over a cost model: gaps are bounded and prompts advance."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from headrace.base.clock import ManualClock
from headrace.control.scheduler.budget import StepCost as LearntCost
from headrace.core.engine_core import EngineCore
from headrace.testing.engine_config import make_architecture, make_engine_config
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor, StepCost

PER_STEP_S, PER_TOKEN_S = 0.010, 0.0005
NUM_STREAMS = 16
ALONE_S = PER_STEP_S + NUM_STREAMS * PER_TOKEN_S


class Run:
    """A core in virtual time that notes when each request got its tokens."""

    def __init__(
        self, factor: float, *, cost: StepCost = StepCost(PER_STEP_S, PER_TOKEN_S), **settings: object
    ) -> None:
        self.clock = ManualClock()
        config = make_engine_config(
            make_architecture(max_position=8192, eos_token_ids=()),
            block_size=16,
            num_kv_blocks=4000,
            max_model_len=8192,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_token_gap_factor=factor,
            **settings,
        )
        self.core = EngineCore(config, SimulatedExecutor(config, clock=self.clock, cost=cost, lazy=True), self.clock)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.arrivals: dict[str, float] = {}

    def add(self, request_id: str, num_prompt: int, max_tokens: int, arrival: float | None = None) -> None:
        first = len(self.arrivals)
        tokens = [(first * 37 + i) % 900 + 3 for i in range(num_prompt)]
        self.arrivals[request_id] = self.clock.monotonic() if arrival is None else arrival
        request = make_request(request_id, tokens, max_tokens=max_tokens, arrival_time=self.arrivals[request_id])
        self.core.add_request(request)

    def until(self, *, time_s: float = float("inf"), ended: str | None = None) -> None:
        """Step until a time or until a request has its first token."""
        for _ in range(20_000):
            if self.clock.monotonic() >= time_s or (ended is not None and self.times[ended]):
                return
            for outputs in self.core.step().values():
                for output in outputs.outputs:
                    assert output.error is None
                    if output.new_token_ids:
                        self.times[output.request_id].append(self.clock.monotonic())
        raise AssertionError("no end in sight")

    def wait_of(self, request_id: str) -> float:
        return self.times[request_id][0] - self.arrivals[request_id]

    def gaps(self, *, after_s: float) -> np.ndarray:
        streams = [times for name, times in self.times.items() if name.startswith("s")]
        return np.array([b - a for times in streams for a, b in pairwise(times) if a >= after_s])


def start_streams(run: Run) -> float:
    for number in range(NUM_STREAMS):
        run.add(f"s{number}", 8, 4000)
    run.until(time_s=3.0)
    return run.clock.monotonic()


@pytest.mark.parametrize("factor", [1.3, 1.5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_every_four_seconds_leaves_the_streams_their_pace(factor: float, depth: int) -> None:
    run = Run(factor, pipeline_depth=depth)
    start = start_streams(run)
    assert np.median(run.gaps(after_s=1.0)) == pytest.approx(ALONE_S)
    for number in range(3):
        run.add(f"p{number}", 1024, 2)
        run.until(time_s=start + 4.0 * (number + 1))
    gaps = run.gaps(after_s=start)
    assert np.percentile(gaps, 99) <= factor * ALONE_S * 1.02
    assert max(run.wait_of(f"p{number}") for number in range(3)) < 4.0


def test_without_a_limit_a_prompt_stops_the_streams() -> None:
    run = Run(0.0)
    start = start_streams(run)
    run.add("p", 1000, 2)
    run.until(ended="p")
    assert run.gaps(after_s=start).max() > 0.5


def test_prompts_advance_side_by_side() -> None:
    """A short prompt behind a long one does not wait for its end, and equal ones end at about the same time."""
    run = Run(1.5)
    start_streams(run)
    run.add("long", 4000, 2)
    run.until(time_s=run.clock.monotonic() + 0.5)
    run.add("short", 60, 2)
    run.until(ended="short")
    assert run.wait_of("short") < 0.5 and not run.times["long"]
    run.add("one", 600, 2)
    run.add("two", 600, 2)
    run.until(ended="one")
    run.until(ended="two")
    assert abs(run.times["one"][0] - run.times["two"][0]) < 0.5
    run.until(ended="long")


def test_a_crowd_at_the_door_is_not_held_back_for_few_streams() -> None:
    run = Run(1.5)
    run.add("s0", 8, 4000)
    run.until(time_s=0.5)
    for number in range(24):
        run.add(f"p{number}", 256, 200)
    began = run.clock.monotonic()
    for number in range(24):
        run.until(ended=f"p{number}")
    assert run.clock.monotonic() - began < 2.0 * 24 * 256 * PER_TOKEN_S


def test_those_who_came_together_are_not_held_back_for_those_who_overtook_them() -> None:
    """32 prompts within 50 ms: the first ones stream while the others arrive, and all end as if there were no limit."""

    def last_first_token(factor: float) -> float:
        run = Run(factor, pipeline_depth=2)
        run.add("s", 8, 400)
        run.until(time_s=1.5)
        start, came = run.clock.monotonic(), 0
        while came < 32:
            while came < 32 and run.clock.monotonic() >= start + 0.0015 * came:
                run.add(f"p{came}", 32, 50, start + 0.0015 * came)
                came += 1
            run.until(time_s=run.clock.monotonic() + 1e-6)
        for number in range(32):
            run.until(ended=f"p{number}")
        return max(run.wait_of(f"p{number}") for number in range(32))

    assert last_first_token(1.5) < 1.1 * last_first_token(0.0)


def test_one_hiccup_changes_nothing() -> None:
    cost = LearntCost()
    for _ in range(20):
        cost.record(0.01, 0)
        cost.record(0.02, 10)
    before = cost.max_prompt_tokens(0.0151, 1)
    assert before == 5
    cost.record(5.0, 0)
    cost.record(5.0, 10)
    assert cost.max_prompt_tokens(0.0151, 1) == before
    assert cost.scaled_gap(2.0) == pytest.approx(0.02)


def test_the_price_of_a_token_comes_from_steps_with_many() -> None:
    cost = LearntCost()
    cost.record(0.01, 0)
    for _ in range(6):
        cost.record(0.030, 40)
        cost.record(0.014, 1)
    assert cost.max_prompt_tokens(0.0201, 1) == 20


def test_a_machine_that_becomes_faster_makes_no_token_free() -> None:
    """Streams were measured while something held the machine up; now steps with prompts are quicker than that."""
    cost = LearntCost()
    for _ in range(9):
        cost.record(0.080, 0)
        cost.record(0.0875, 10)
    chunks = []
    for _ in range(12):
        chunks.append(cost.max_prompt_tokens(cost.scaled_gap(1.4) or 0.0, 4))
        cost.record(0.015 + 0.0007 * chunks[-1], chunks[-1])
    assert chunks[0] == max(chunks) == 20
    assert (cost.scaled_gap(1.0) or 0.0) < 0.025


def test_chunks_grow_in_steps_unless_it_is_urgent() -> None:
    cost = LearntCost()
    cost.record(0.010, 0)
    cost.record(0.010, 0)
    cost.record(0.0101, 8)
    assert cost.max_prompt_tokens(0.020, 4) == 16
    assert cost.max_prompt_tokens(0.020, 4, urgency=20.0) == 320


def test_stale_costs_are_measured_anew() -> None:
    cost = LearntCost()
    assert cost.scaled_gap(2.0) is None and cost.is_stale(1)
    for _ in range(4):
        cost.record(0.01, 0)
    assert not cost.is_stale(1) and cost.is_stale(2)
    for _ in range(32):
        cost.record(0.02, 10)
    assert cost.is_stale(1)
    cost.record(0.04, 0)
    assert cost.is_stale(1) and cost.scaled_gap(2.0) == pytest.approx(0.02)
    cost.record(0.03, 0)
    assert not cost.is_stale(1) and cost.scaled_gap(2.0) == pytest.approx(0.06)
    cost.record(0.05, 0, 3)
    cost.record(0.05, 0, 3)
    assert not cost.is_stale(3) and cost.is_stale(1)
    assert cost.scaled_gap(2.0) == pytest.approx(0.10)


def test_a_prompt_that_waits_long_gets_more_within_bounds() -> None:
    """One that would take far too long at the streams' pace ends sooner, and never makes them wait without end."""
    run = Run(1.1)
    start = start_streams(run)
    run.add("p", 3000, 2)
    run.until(ended="p")
    least = 0.1 * ALONE_S / PER_TOKEN_S
    assert run.wait_of("p") < 0.75 * 3000 / least * 1.1 * ALONE_S
    assert run.gaps(after_s=start).max() <= (1.0 + 2.5 * 0.1) * ALONE_S * 1.05


def test_gaps_that_nobody_feels_hold_no_prompt_back() -> None:
    run = Run(1.5, cost=StepCost(0.002, 0.0001))
    run.add("s0", 8, 4000)
    run.until(time_s=1.0)
    run.add("p", 1000, 2)
    start = run.clock.monotonic()
    run.until(ended="p")
    assert run.wait_of("p") < 0.25
    assert run.gaps(after_s=start).max() < 0.0155
