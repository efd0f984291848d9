"""How near a decode step of one stream comes to the limit of the memory bus.

    python benchmarks/cpu_ops/bus.py MODEL.gguf [--threads 2] [--activations int8|exact] [--kv float16] [--context 100]

The limit is what the same number of threads read from one buffer, each its share, and do nothing else (`bus.cpp`, which
needs a C++ compiler), turn by turn with steps of the model in one run. Memory that is read again and again stays in the
last cache in part, so the limit depends on the size: it is printed for some sizes, and for as many bytes as a step
reads, which is what the step is held against: shares are those of each turn, since machines have faster and slower
minutes. Norms and activations, less than 1 % of the bytes, are not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from step import BLOCK, Bench

from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.quantization.raw_tensor import RawTensor
from headrace.device.runner.graphs import GraphMode
from headrace.entrypoints.engine_config import load_engine_config

SIZES_MB = (64, 96, 256)
AHEAD = (0, 1024, 4096)
PASSES = 12


class Bus:
    """Threads that read a buffer of ``num_bytes``."""

    def __init__(self, folder: Path, num_bytes: int, threads: int) -> None:
        compiler = shutil.which("c++") or sys.exit("this needs a C++ compiler")
        library = folder / "bus.so"
        source = Path(__file__).with_name("bus.cpp")
        flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        self._native = ctypes.CDLL(str(library))
        self._native.bus_open.restype = ctypes.c_void_p
        self._native.bus_open.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self._native.bus_read.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_double),
        ]
        self._native.bus_close.argtypes = [ctypes.c_void_p]
        self._bus = self._native.bus_open(num_bytes, threads)

    def read(self, num_bytes: int, ahead: int) -> list[float]:
        """GB/s of each pass but the first, which finds what others left in the caches."""
        seconds = (ctypes.c_double * (PASSES + 1))()
        self._native.bus_read(self._bus, num_bytes, ahead, PASSES + 1, seconds)
        return [num_bytes / s / 1e9 for s in seconds[1:]]

    def close(self) -> None:
        """End the threads."""
        self._native.bus_close(self._bus)


class CountingOps(NativeOps):
    """Native ops that know how many bytes of weights they packed, and in which roles."""

    num_bytes: dict[str, int]

    def pack_weight(self, parts: Sequence[RawTensor], role: str) -> object:  # type: ignore[override]
        weight = super().pack_weight(parts, role)  # type: ignore[arg-type]
        self.num_bytes[role] = self.num_bytes.get(role, 0) + weight.num_bytes
        return weight


def describe(rates: list[float]) -> str:
    """Median and best."""
    return f"median {statistics.median(rates):5.1f}, best {max(rates):5.1f} GB/s"


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--kv", default="float16")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=12.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"model": args.model, "activations": args.activations, "kv_cache_dtype": args.kv, "ops": "native"}
    config = load_engine_config(settings)
    ops = CountingOps(args.threads, args.activations)
    ops.num_bytes = {}
    bench = Bench(config, ops, args.kv, BLOCK)
    head = sum(size for role, size in ops.num_bytes.items() if role in ("head", "embedding"))
    layers = sum(ops.num_bytes.values()) - head
    cache = bench.caches[0]
    per_token = 2 * cache.key[0, :, :, 0].numel() * cache.key.element_size()
    kv = len(bench.caches) * per_token * args.context
    step_bytes = layers + head + kv
    sizes = [mb * 1_000_000 for mb in SIZES_MB] + [step_bytes]

    rates: dict[tuple[int, int], list[float]] = {}
    turns: list[tuple[float, list[tuple[float, float]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        bus = Bus(Path(folder), max(sizes), args.threads)
        ctx = bench.prepare(1, 1, args.context)
        until = time.perf_counter() + args.seconds
        while time.perf_counter() < until:
            bench.step(ctx, GraphMode.FULL)
            steps = [bench.step(ctx, GraphMode.FULL) for _ in range(60)]
            limit = 0.0
            for size in sizes:
                for ahead in AHEAD:
                    found = bus.read(size, ahead)
                    rates.setdefault((size, ahead), []).extend(found)
                    if size == step_bytes:
                        limit = max(limit, statistics.median(found))
            turns.append((limit, steps))
        bus.close()

    print(
        f"{ops.isa}, {args.threads} threads, activations {args.activations}, {len(turns)} turns of 60 steps and reads"
    )
    for size in sizes:
        best = max(AHEAD, key=lambda ahead: statistics.median(rates[size, ahead]))
        how = f"fetched {best} bytes ahead" if best else "as the CPU fetches it"
        note = ", as many as a step reads" if size == step_bytes else ""
        print(f"bus, {size / 1e6:5.1f} MB: {describe(rates[size, best])} ({how}{note})")
    print(f"a step reads {layers / 1e6:.1f} MB in layers, {head / 1e6:.1f} in the head, {kv / 1e6:.1f} of KV")
    for name, num_bytes, part in (("layers", layers + kv, [0]), ("head", head, [1]), ("step", step_bytes, [0, 1])):
        seconds = [[sum(step[i] for i in part) for step in steps] for _, steps in turns]
        shares = [num_bytes / 1e9 / statistics.median(s) / limit for s, (limit, _) in zip(seconds, turns, strict=True)]
        every = [s for turn in seconds for s in turn]
        reached = describe([num_bytes / s / 1e9 for s in every])
        print(
            f"{name:6}: median {statistics.median(every) * 1e3:5.2f} ms, {reached}, "
            f"of the bus {statistics.median(shares):.0%} (turns: {min(shares):.0%} to {max(shares):.0%})"
        )


if __name__ == "__main__":
    main()
