"""Times the sampler's work on a row of logits, natively and in NumPy: CPU time of the thread, median over many rows.

python benchmarks/cpu_ops/sampling.py [--vocab 49152] [--rows 1 8 32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.sampling.kernels import NumpySampling, Penalties, SamplingKernels, Shape

Work = Callable[[SamplingKernels, np.ndarray, int], object]


def _draw(min_p: float, top_k: int, top_p: float) -> Work:
    return lambda kernels, x, seed: kernels.draw(x, float(x.max()), Shape(0.8, min_p, top_k, top_p), seed, 100)


def make_cases(vocab: int, rng: np.random.Generator) -> dict[str, Work]:
    """Each part as a function of the kernels, a row and its number."""
    words = rng.integers(-(1 << 31), 1 << 31, -(-vocab // 32)).astype(np.int32)
    seen, counts = np.zeros(vocab, dtype=bool), np.zeros(vocab, dtype=np.int32)
    seen[rng.integers(0, vocab, 500)] = True
    counts[rng.integers(0, vocab, 100)] = 2
    return {
        "bitmask": lambda kernels, x, _: kernels.apply_bitmask(x, words),
        "penalties": lambda kernels, x, _: kernels.apply_penalties(x, seen, counts, Penalties(1.1, 0.2, 0.1)),
        "draw": _draw(0.0, 0, 1.0),
        "min_p 0.05": _draw(0.05, 0, 1.0),
        "top_k 50": _draw(0.0, 50, 1.0),
        "top_p 0.9": _draw(0.0, 0, 0.9),
        "top_k 50, top_p 0.9": _draw(0.0, 50, 0.9),
        "logprobs 0": lambda kernels, x, _: kernels.token_logprobs(x, 17, 0),
        "logprobs 20": lambda kernels, x, _: kernels.token_logprobs(x, 17, 20),
    }


def measure(work: Work, kernels: SamplingKernels, logits: np.ndarray, repeats: int) -> float:
    """Microseconds for all rows."""
    spent = []
    for _ in range(repeats):
        rows = logits.copy()
        began = time.thread_time()
        for number, row in enumerate(rows):
            work(kernels, row, number)
        spent.append(time.thread_time() - began)
    return statistics.median(spent) * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    native, twin = NativeOps(1).sampling, NumpySampling()
    logits = (rng.standard_normal((max(arguments.rows), arguments.vocab)) * 3).astype(np.float32)
    logits[:, :40] += np.linspace(12, 4, 40, dtype=np.float32)
    print(f"{'µs for rows':22}" + "".join(f"{count:>22}" for count in arguments.rows))
    for name, work in make_cases(arguments.vocab, rng).items():
        line = f"{name:22}"
        for count in arguments.rows:
            times = [measure(work, kernels, logits[:count], arguments.repeats) for kernels in (twin, native)]
            line += f"{times[0]:>11.0f} -> {times[1]:<7.0f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
