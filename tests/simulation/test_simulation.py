"""The real engine core in virtual time under random work and faults; a failure prints the call that repeats it."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.testing.simulation import simulate

SEEDS_PER_TEST = 25


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, SEEDS_PER_TEST))
def test_every_promise_holds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_depth_and_policy(depth: int, policy: str) -> None:
    for seed in range(1000, 1010):
        simulate(seed, depth=depth, policy=policy)


@pytest.mark.slow
def test_the_scenarios_hold_what_they_promise() -> None:
    """Work and faults of every kind occur, so that silence means something."""
    counts: Counter[str] = Counter()
    for seed in range(2000, 2040):
        counts.update(simulate(seed).counts)
    for kind in ("steps", "aborts", "length", "stop", "error", "deaths", "Sleep", "ResetPrefixCache"):
        assert counts[kind], kind


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 12_000, 100))
def test_two_thousand_more_seeds(first: int) -> None:
    for seed in range(first, first + 100):
        simulate(seed)
