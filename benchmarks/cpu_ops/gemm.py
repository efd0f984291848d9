"""Times each product of the default model alone, by rows and format, weights from memory as in a step.

    python benchmarks/cpu_ops/gemm.py [--threads 2] [--isa avx2] [--rows 1 8 32] [--shapes qkv down] [--formats int4]

A product runs over as many different matrices as fill ``--megabytes``, recorded into one plan, so that few rows read
weights from memory as a decode step does. Prints GOP/s (a sum and a product are two), GB/s of weights for up
to eight rows, and the share of the bound: the lesser of what the multipliers can do and what memory can deliver.

The bounds are those of a machine: ``--int-gops`` is its peak of int8 products, ``--float-gops`` of float32 ones and
``--gbps`` its memory. The defaults are two Zen 4 cores at 3.7 GHz, where a group of 32 costs an int4 product 8
instructions of products and 3 of scales in the same pipes (int8: 2).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from headrace.device.ops.cpu import _native

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
# Storage, exact activations, share of the multipliers' time that products take.
FORMATS = {"int4": ("Q4_1", False, 8 / 11), "int8": ("Q8_0", False, 8 / 10), "exact": ("Q4_1", True, 1.0)}
SCALES = {"Q4_1": 2, "Q8_0": 1}


def make_matrix(storage: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks with small scales."""
    halves, block = SCALES[storage], 20 if storage == "Q4_1" else 34
    blocks = rng.integers(0, 256, (rows, cols // 32, block), dtype=np.uint8)
    scales = (rng.standard_normal((rows, cols // 32, halves)) * 0.01).astype(np.float16)
    blocks[:, :, : 2 * halves] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


class Product:
    """One shape in one format: enough matrices, a plan over all of them."""

    def __init__(self, team: _native.Team, shape: str, format_name: str, max_rows: int, megabytes: float) -> None:
        self.team, self.format = team, format_name
        outputs, width = SHAPES[shape]
        storage, exact, _ = FORMATS[format_name]
        rng = np.random.default_rng(0)
        gated = shape == "gate_up"
        parts = [make_matrix(storage, outputs // (1 + gated), width, rng) for _ in range(1 + gated)]
        sources = [(storage, part) for part in parts]
        self.weights = [_native.pack(team, sources, width, gated=gated)]
        self.bytes = self.weights[0].num_bytes
        self.copies = max(1, int(megabytes * 1e6 / self.bytes))
        self.weights += [_native.pack(team, sources, width, gated=gated) for _ in range(self.copies - 1)]
        self.ops = 2 * outputs * width
        x = torch.from_numpy(rng.standard_normal((max_rows, width)).astype(np.float32))
        out = torch.empty(max_rows, outputs // (1 + gated))
        self.plan = _native.Plan(max_rows, max_rows, max_rows)
        for weight in self.weights:
            if gated:
                op = _native.gated(x, weight, "silu", exact, out, _native.Rows.TOKENS)
            else:
                op = _native.linear(x, weight, None, 0.0, exact, out, _native.Rows.TOKENS)
            self.plan.append(op)
        self.plan.finish(team, [out.data_ptr()])
        self.kept = (x, out)

    def seconds(self, rows: int) -> float:
        """One product's share of a run over all matrices."""
        began = time.perf_counter()
        self.plan.replay(self.team, rows, rows)
        return (time.perf_counter() - began) / self.copies

    def bound(self, rows: int, args: argparse.Namespace) -> float:
        """GOP/s that the machine allows."""
        share = FORMATS[self.format][2]
        peak = (args.float_gops if self.format == "exact" else args.int_gops) * share
        return float(min(peak, args.gbps * self.ops * rows / self.bytes))


def main() -> None:
    """Run all shapes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--int-gops", type=float, default=936)
    parser.add_argument("--float-gops", type=float, default=237)
    parser.add_argument("--gbps", type=float, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    team = _native.Team(args.threads, args.isa)
    print(f"{team.isa}, {args.threads} threads; median of {args.repeats}")
    for format_name in args.formats:
        for shape in args.shapes:
            product = Product(team, shape, format_name, max(args.rows), args.megabytes)
            for rows in args.rows:
                product.seconds(rows)
                seconds = statistics.median(product.seconds(rows) for _ in range(args.repeats))
                speed = product.ops * rows / seconds / 1e9
                stream = f"{product.bytes / seconds / 1e9:6.1f} GB/s" if rows <= 8 else " " * 11
                share = speed / product.bound(rows, args)
                label = f"{format_name:5} {shape:7} {rows:4} rows"
                print(f"{label}: {seconds * 1e6:9.1f} us {speed:6.1f} GOP/s {stream} {share:4.0%}")


if __name__ == "__main__":
    main()
