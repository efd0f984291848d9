"""Times whole forwards of the default model without the engine: eager and replayed, decode and prefill.

    python benchmarks/cpu_ops/step.py MODEL.gguf [--threads 2] [--activations int8|exact] [--kv float16]

Prints, per case, the best and the median step and what they mean in tokens per second. Cases are interleaved, so that a
noisy neighbour hits all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from headrace.config.sections import EngineConfig
from headrace.device.attention.metadata import AttentionMetadata, ForwardContext
from headrace.device.loading.loader import load_model
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.ops.cpu.plan_runner import PlanRunner
from headrace.device.runner.graphs import Dispatch, ForwardInputs, GraphMode
from headrace.entrypoints.engine_config import load_engine_config

BLOCK = 32
CLOCK = time.perf_counter
CASES = (
    (1, 1, 100),
    (1, 1, 1000),
    (8, 1, 100),
    (8, 1, 1000),
    (32, 1, 100),
    (32, 1, 1000),
    (1, 1024, 1024),
    (16, 1, 100),
    (16, 1, 300),
)


class Bench:
    """A model with KV blocks for the largest case and the persistent inputs of a runner."""

    def __init__(self, config: EngineConfig, ops: NativeOps, kv_dtype: str, block: int) -> None:
        loaded = load_model(config, ops)
        self.model, self.ops, self.block = loaded.model, ops, block
        self.max_tokens, self.max_reqs, self.max_blocks = 1024, 32, 1100 // block + 1
        backend = loaded.attention.backend
        specs = [backend.make_spec(facts, block, kv_dtype) for facts in self.model.layer_facts()]
        self.caches = [backend.allocate(spec, 1 + self.max_reqs * self.max_blocks) for spec in specs]
        self.ids = torch.zeros(self.max_tokens, dtype=torch.int32)
        self.positions = torch.zeros(self.max_tokens, dtype=torch.int32)
        self.start = torch.zeros(self.max_reqs + 1, dtype=torch.int32)
        self.lens = torch.zeros(self.max_reqs, dtype=torch.int32)
        self.slots = torch.zeros(self.max_tokens, dtype=torch.int64)
        blocks = 1 + torch.randperm(self.max_reqs * self.max_blocks, dtype=torch.int32)
        self.table = blocks.reshape(self.max_reqs, self.max_blocks).contiguous()
        self.runner = PlanRunner(self.model, ops)
        sizes = (self.max_tokens, self.max_reqs, self.max_tokens, self.max_tokens)
        meta = AttentionMetadata(*sizes, self.start, self.lens, self.table, self.slots)
        self.runner.capture(self.ids, ForwardContext(self.positions, [meta], [0] * len(specs), self.caches))

    def prepare(self, reqs: int, queries: int, length: int) -> ForwardContext:
        """Fill the inputs for ``reqs`` requests of ``length`` tokens, ``queries`` of them new."""
        tokens = reqs * queries
        position = torch.arange(length - queries, length)
        self.ids[:tokens] = torch.randint(0, 49152, (tokens,), dtype=torch.int32)
        self.positions[:tokens] = position.repeat(reqs)
        self.start[: reqs + 1] = torch.arange(reqs + 1) * queries
        self.lens[:reqs] = length
        for r in range(reqs):
            self.slots[r * queries : (r + 1) * queries] = (
                self.table[r, position // self.block].long() * self.block + position % self.block
            )
        meta = AttentionMetadata(
            tokens,
            reqs,
            queries,
            length,
            self.start[: reqs + 1],
            self.lens[:reqs],
            self.table[:reqs],
            self.slots[:tokens],
        )
        return ForwardContext(self.positions[:tokens], [meta], [0] * len(self.caches), self.caches)

    def step(self, ctx: ForwardContext, mode: GraphMode) -> tuple[float, float]:
        """Seconds of a forward and of the head of every request's last row, down to its best token."""
        meta = ctx.groups[0]
        ids, last = self.ids[: meta.num_tokens], (self.start[1 : meta.num_reqs + 1] - 1).tolist()
        inputs = ForwardInputs(meta.num_tokens, meta.num_reqs, lambda: (ids, ctx))
        began = CLOCK()
        hidden = self.runner.run(Dispatch(mode, "", meta.num_tokens), inputs, None)
        middle = CLOCK()
        assert isinstance(hidden, torch.Tensor)
        self.runner.run_head(hidden, last, len(last))
        return middle - began, CLOCK() - middle


@torch.inference_mode()
def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--kv", default="float16")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case and mode")
    parser.add_argument("--only", type=int, default=None, help="one case by number")
    parser.add_argument("--eager", action="store_true", help="time eager steps too")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time: for one thread on a busy machine")
    args = parser.parse_args()
    if args.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    torch.set_num_threads(1)
    settings = {"model": args.model, "activations": args.activations, "kv_cache_dtype": args.kv, "ops": "native"}
    began = CLOCK()
    bench = Bench(
        load_engine_config(settings), NativeOps(args.threads, args.activations, args.isa), args.kv, args.block
    )
    print(f"{bench.ops.isa}, {args.threads} threads, loaded in {CLOCK() - began:.2f} s")
    modes = (GraphMode.FULL, GraphMode.EAGER) if args.eager else (GraphMode.FULL,)
    cases = CASES if args.only is None else CASES[args.only : args.only + 1]
    times: dict[tuple[tuple[int, int, int], GraphMode], list[tuple[float, float]]] = {}
    for _ in range(4):
        for case in cases:
            ctx = bench.prepare(*case)
            for mode in modes:
                bench.step(ctx, mode)
                until = CLOCK() + args.seconds / 4
                while CLOCK() < until:
                    times.setdefault((case, mode), []).append(bench.step(ctx, mode))
    for (case, mode), seconds in times.items():
        reqs, queries, length = case
        total = [forward + head for forward, head in seconds]
        best, median = min(total), statistics.median(total)
        forward, head = (statistics.median(s[i] for s in seconds) for i in (0, 1))
        print(
            f"{reqs:3} x {queries:4} new at {length:4}, {mode.value:5}: best {best * 1e3:8.2f} ms, median "
            f"{median * 1e3:8.2f} ms ({forward * 1e3:.2f} + {head * 1e3:.2f}), {reqs * queries / median:8.0f} tokens/s "
            f"(best {reqs * queries / best:.0f})"
        )


if __name__ == "__main__":
    main()
