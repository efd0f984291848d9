"""What the control plane costs per running request and step, as a ratio to a fixed Python loop of the same run.

Measures ``schedule`` + ``update_from_output`` in steady decode over running requests and context lengths, hashing and
admission of a long prompt. Times are the thread's own, so that other work on the machine does not count; ratios to the
loop survive slow machines, microseconds are printed beside them.

    python benchmarks/host_path.py [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from statistics import median
from time import thread_time
from typing import Any

from headrace.config.sections import SchedulerSection
from headrace.control.kv_cache.hashing import HashChain
from headrace.control.scheduler.scheduler import Scheduler
from headrace.messages.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.sampling_params import SamplingParams

BLOCK = 16
CALIBRATION_LOOPS = 200_000


def calibrate() -> float:
    """Microseconds of one turn of the calibration loop: dictionary, list, integer and method work."""
    table: dict[int, int] = {}
    items: list[int] = []
    begin = thread_time()
    for i in range(CALIBRATION_LOOPS):
        key = i & 1023
        table[key] = table.get(key, 0) + i
        items.append(key)
        if len(items) > 1024:
            items.clear()
    return (thread_time() - begin) / CALIBRATION_LOOPS * 1e6


def make_scheduler(num_running: int, num_blocks: int, max_batched: int = 8192) -> Scheduler:
    spec = KVCacheSpec(KVCacheKind.FULL, BLOCK, 1, 64, "float16", (), 4096)
    kv = KVCacheConfig(num_blocks, BLOCK, (KVCacheGroup((0,), spec),))
    section = SchedulerSection(max_num_seqs=num_running, max_num_batched_tokens=max_batched)
    return Scheduler(section, kv, max_model_len=16384, enable_prefix_caching=True)


def make_request(index: int, length: int) -> EngineCoreRequest:
    prompt = [(index * 7919 + i * 31) % 49152 for i in range(length)]
    sampling = SamplingParams(max_tokens=4096, temperature=0.0, seed=0)
    return EngineCoreRequest(request_id=f"request-{index}", prompt_token_ids=prompt, sampling=sampling)


def answer(scheduler: Scheduler, step: Any) -> ModelRunnerOutput:
    """What a runner would return: a token for each request whose last token was computed."""
    sampled = [
        [7] if scheduler.get_request(i).num_output_placeholders else []  # type: ignore[union-attr]
        for i in step.num_scheduled_tokens
    ]
    return ModelRunnerOutput(request_ids=list(step.num_scheduled_tokens), sampled_token_ids=sampled)


def measure_decode(num_running: int, context: int, num_steps: int = 200) -> float:
    """Microseconds of schedule + update per running request in steady decode at depth 2."""
    scheduler = make_scheduler(num_running, num_running * ((context + 600) // BLOCK + 2) + 100)
    for index in range(num_running):
        scheduler.add_request(make_request(index, context), 0.0)
    while scheduler.num_waiting or any(not r.num_output_tokens for r in scheduler._state.running):
        step = scheduler.schedule(0.0)
        scheduler.update_from_output(step, answer(scheduler, step), 0.0)
    ids = [request.request_id for request in scheduler._state.running]
    output = ModelRunnerOutput(request_ids=ids, sampled_token_ids=[[7]] * num_running)
    pending = scheduler.schedule(0.0)
    spent: list[float] = []
    gc.collect()
    for _ in range(num_steps):
        begin = thread_time()
        following = scheduler.schedule(0.0)
        scheduler.update_from_output(pending, output, 0.0)
        spent.append(thread_time() - begin)
        assert len(following.num_scheduled_tokens) == num_running
        pending = following
    return sum(spent) / len(spent) / num_running * 1e6


def measure_prompt(length: int, repeats: int = 15) -> tuple[float, float, float]:
    """Milliseconds of hashing, of admission cold and of admission with the whole prompt in the cache."""
    hashing, cold, warm = [], [], []
    for index in range(repeats):
        request = make_request(index, length)
        begin = thread_time()
        HashChain(BLOCK).extend(request.prompt_token_ids, length)
        hashing.append(thread_time() - begin)
        scheduler = make_scheduler(4, 2 * length // BLOCK + 10, max_batched=2 * length)
        for times in (cold, warm):
            scheduler.add_request(request, 0.0)
            begin = thread_time()
            step = scheduler.schedule(0.0)
            times.append(thread_time() - begin)
            scheduler.update_from_output(step, answer(scheduler, step), 0.0)
            scheduler.finish_requests(None, FinishReason.ABORT)
    return tuple(median(times) * 1e3 for times in (hashing, cold, warm))  # type: ignore[return-value]


def best(measure: Callable[[], float], repeats: int) -> float:
    """The least disturbed of several runs."""
    return min(measure() for _ in range(repeats))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file to write the numbers to")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"calibration_us": best(calibrate, 5)}
    loop = results["calibration_us"]
    print(f"calibration loop: {loop:.4f} us a turn")
    print(f"{'running':>8} {'context':>8} {'us/request/step':>16} {'ratio':>8}")
    for num_running, context in [(64, 100), (256, 100), (256, 1000), (256, 8000), (1024, 100), (1024, 1000)]:
        cost = best(lambda n=num_running, c=context: measure_decode(n, c), arguments.repeats)  # type: ignore[misc]
        results[f"decode_{num_running}x{context}_us"] = cost
        print(f"{num_running:>8} {context:>8} {cost:>16.2f} {cost / loop:>8.1f}")
    for name, value in zip(("hashing", "admission_cold", "admission_warm"), measure_prompt(8192), strict=True):
        results[f"{name}_8192_ms"] = value
        print(f"{name} of 8,192 tokens: {value:.2f} ms, ratio {value * 1e3 / loop:.0f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
