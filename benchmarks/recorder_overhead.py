"""What the flight recorder costs per step, at 1, 64 and 256 running requests.

Runs the real core on an executor that computes nothing, with and without the watchers, alternating, and takes the best
of several rounds of each: the difference is what recording adds to a step. It is set against the time of a real step of
a model with as many running requests, measured in the same run.

    python benchmarks/recorder_overhead.py [--model MODEL]
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import Future
from statistics import median
from typing import Any

from headrace.base.clock import SystemClock
from headrace.base.progress import ProgressWord
from headrace.core.build import build_core
from headrace.core.engine_core import EngineCore
from headrace.core.watching import make_watching
from headrace.entrypoints.engine_config import load_engine_config
from headrace.executor.base import Executor, ExecutorReady
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.runner_output import ModelRunnerOutput, StepStats
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput
from headrace.testing.engine_config import make_engine_config
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor

STATS = StepStats(prepare_s=1e-4, forward_s=1e-3, sample_s=1e-4, graph_mode="FULL", graph_reason="captured")


class EmptyExecutor(Executor):
    """Samples token 5 for everybody at once."""

    def __init__(self, ready: ExecutorReady) -> None:
        self._ready = ready

    def start(self) -> ExecutorReady:
        return self._ready

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        return None

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        ids = list(step.num_scheduled_tokens)
        future: Future[ModelRunnerOutput | None] = Future()
        future.set_result(ModelRunnerOutput(request_ids=ids, sampled_token_ids=[[5] for _ in ids], stats=STATS))
        return future

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        raise NotImplementedError

    def control(self, request: Any) -> Any:
        return None

    def check_health(self) -> None:
        return None

    def shutdown(self) -> None:
        return None


def make_core(num_running: int, num_steps: int, *, watched: bool) -> EngineCore:
    """A core whose requests all decode."""
    length = num_steps + 16
    config = make_engine_config(
        block_size=16,
        num_kv_blocks=num_running * (length // 16 + 2) + 2,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(64, 8 * num_running),
        max_model_len=length,
        pipeline_depth=2,
    )
    clock = SystemClock()
    ready = SimulatedExecutor(config).start()
    parts = make_watching(config, clock).parts() if watched else {}
    core = EngineCore(config, EmptyExecutor(ready), clock, **parts)
    for number in range(num_running):
        core.add_request(make_request(f"r{number}", [10 + number, 11, 12, 13], num_steps + 8))
    for _ in range(4):
        core.step()
    return core


def step_seconds(num_running: int, num_steps: int, *, watched: bool) -> float:
    """Processor seconds of one step."""
    core = make_core(num_running, num_steps, watched=watched)
    began = time.thread_time()
    for _ in range(num_steps):
        core.step()
    return (time.thread_time() - began) / num_steps


def measure(num_running: int, num_steps: int, rounds: int, step_ms: float) -> dict[str, float]:
    """Best of several rounds with and without."""
    plain, watched = [], []
    for _ in range(rounds):
        plain.append(step_seconds(num_running, num_steps, watched=False))
        watched.append(step_seconds(num_running, num_steps, watched=True))
    cost_us = 1e6 * (min(watched) - min(plain))
    return {
        "running": num_running,
        "host_step_us": 1e6 * min(plain),
        "recorder_us": cost_us,
        "real_step_ms": step_ms,
        "share_of_real_step": cost_us / 1e3 / step_ms,
    }


def real_step_ms(model: str, num_running: int, num_steps: int = 12) -> float:
    """Median milliseconds of a step of a real model whose requests all decode, with a little context each."""
    settings = {
        "model": model,
        "max_model_len": 256,
        "max_num_seqs": num_running,
        "num_kv_blocks": 3 * num_running + 16,
    }
    config = load_engine_config(settings)
    core = build_core(config, "headrace.executor.uniproc:make_executor", {}, ProgressWord())
    try:
        for number in range(num_running):
            core.add_request(make_request(f"r{number}", [100 + number, *range(200, 215)], 64))
        while core.scheduler.make_stats().generation_tokens < 3 * num_running:
            core.step()
        times = []
        for _ in range(num_steps):
            began = time.perf_counter()
            core.step()
            times.append(1e3 * (time.perf_counter() - began))
        return median(times)
    finally:
        core.shutdown()


def main() -> None:
    """Print one line of JSON per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m", help="whose steps the cost is set against")
    args = parser.parse_args()
    for num_running in (1, 64, 256):
        step_ms = real_step_ms(args.model, num_running)
        print(json.dumps(measure(num_running, args.steps, args.rounds, step_ms)), flush=True)


if __name__ == "__main__":
    main()
