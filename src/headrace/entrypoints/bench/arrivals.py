"""When requests arrive: pure functions from a seed to seconds after the start."""

from __future__ import annotations

from random import Random


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Independent users: gaps are exponential with a mean of ``1 / rate`` seconds; the first comes at once."""
    random = Random(f"arrivals-{seed}")
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += random.expovariate(rate)
    return times


def burst_arrivals(num_requests: int, rate: float, burst_size: int) -> list[float]:
    """``burst_size`` requests at once, spaced so that the mean is ``rate`` requests per second."""
    return [index // burst_size * burst_size / rate for index in range(num_requests)]
