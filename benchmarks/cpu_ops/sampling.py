"""Times the sampler's work on rows of logits, natively and in NumPy: median over many repeats.

python benchmarks/cpu_ops/sampling.py [--vocab 49152] [--rows 1 8 32] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.sampling.kernels import Draw, NumpySampling, Penalties, SamplingKernels, Shape, WantedLogprobs

Work = Callable[[SamplingKernels, np.ndarray], object]


PEAK = 24.0


def _draw(min_p: float, top_k: int, top_p: float) -> Work:
    how = Shape(0.8, min_p, top_k, top_p)
    return lambda kernels, rows: kernels.draw([Draw(x, PEAK, how, seed, 100) for seed, x in enumerate(rows)])


def _logprobs(count: int) -> Work:
    return lambda kernels, rows: kernels.token_logprobs([WantedLogprobs(x, 17, count) for x in rows])


def _each(work: Callable[[SamplingKernels, np.ndarray], object]) -> Work:
    return lambda kernels, rows: [work(kernels, x) for x in rows]


def make_cases(vocab: int, rng: np.random.Generator) -> dict[str, Work]:
    """Each part as a function of the kernels and the rows."""
    words = rng.integers(-(1 << 31), 1 << 31, -(-vocab // 32)).astype(np.int32)
    seen, counts = np.zeros(vocab, dtype=bool), np.zeros(vocab, dtype=np.int32)
    seen[rng.integers(0, vocab, 500)] = True
    counts[rng.integers(0, vocab, 100)] = 2
    return {
        "bitmask": _each(lambda kernels, x: kernels.apply_bitmask(x, words)),
        "penalties": _each(lambda kernels, x: kernels.apply_penalties(x, seen, counts, Penalties(1.1, 0.2, 0.1))),
        "draw": _draw(0.0, 0, 1.0),
        "min_p 0.05": _draw(0.05, 0, 1.0),
        "top_k 50": _draw(0.0, 50, 1.0),
        "top_p 0.9": _draw(0.0, 0, 0.9),
        "top_k 50, top_p 0.9": _draw(0.0, 50, 0.9),
        "logprobs 0": _logprobs(0),
        "logprobs 20": _logprobs(20),
    }


def measure(work: Work, kernels: SamplingKernels, logits: np.ndarray, repeats: int) -> float:
    """Microseconds for all rows."""
    spent = []
    for _ in range(repeats):
        rows = logits.copy()
        began = time.perf_counter()
        work(kernels, rows)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    native, twin = NativeOps(arguments.threads).sampling, NumpySampling()
    logits = (rng.standard_normal((max(arguments.rows), arguments.vocab)) * 3).astype(np.float32)
    logits[:, :40] += np.linspace(12, 4, 40, dtype=np.float32)
    logits[:, 3] = PEAK
    print(f"{'µs for rows':22}" + "".join(f"{count:>22}" for count in arguments.rows))
    for name, work in make_cases(arguments.vocab, rng).items():
        line = f"{name:22}"
        for count in arguments.rows:
            times = [measure(work, kernels, logits[:count], arguments.repeats) for kernels in (twin, native)]
            line += f"{times[0]:>11.0f} -> {times[1]:<7.0f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
