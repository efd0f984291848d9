"""What the output path costs: microseconds per token from the core's message to what a consumer takes.

Processing includes detokenisation, stop strings where asked, and one `take` per request and step (a consumer that keeps
up). Each number is also given as a ratio to a fixed Python loop of the same run, so that machines can be compared.

    python benchmarks/output_path.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.frontend.fan_out import RequestGroup
from headrace.frontend.input_processor import InputProcessor, PromptTokens
from headrace.frontend.observer import NullObserver
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import RequestLimits
from headrace.messages.outputs import EngineCoreOutput
from headrace.messages.runner_output import TokenLogprobs
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams

CALIBRATION_STEPS = 20_000
ROUNDS = 5
TOKENS = 20_000
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop strings": {"stop": ("\nUser:", "Observation: none", "</answer of the test>")},
    "logprobs 5": {"logprobs": 5},
    "cumulative": {"output_kind": RequestOutputKind.CUMULATIVE},
}


def calibrate() -> float:
    """Microseconds of one turn of a fixed loop over a dict, a list and a string."""
    table = {value: str(value) for value in range(1000)}
    started = time.perf_counter()
    parts: list[str] = []
    total = 0
    for step in range(CALIBRATION_STEPS):
        text = table[(step * 7) % 1000]
        parts.append(text)
        total += len(text)
        if len(parts) > 100:
            parts = ["".join(parts)[:10]]
    assert total
    return (time.perf_counter() - started) / CALIBRATION_STEPS * 1e6


def measure(tokenizer: Tokenizer, num_requests: int, options: dict[str, Any], num_before: int = 0) -> float:
    """Microseconds per token with ``num_requests`` requests that already have ``num_before`` tokens each."""
    limits = RequestLimits(max_model_len=1 << 20, vocab_size=tokenizer.num_tokens, kv_cache_tokens=1 << 20)
    source = InputProcessor(tokenizer, limits, seed=0, id_suffix="")
    processor = OutputProcessor(NullObserver())
    rng = random.Random(7)
    params = SamplingParams(**{"max_tokens": 100_000, "output_kind": RequestOutputKind.DELTA, **options})
    groups = []
    for place in range(num_requests):
        prompt = PromptTokens([rng.randrange(3, 1000) for _ in range(50)])
        request = source.make_request(prompt, params, external_id=str(place), arrival=0.0)
        groups.append(RequestGroup(str(place), request, None, tokenizer))
        processor.add(groups[-1])
    ids = [group.children[0].request_id for group in groups]
    vocabulary = range(3, tokenizer.num_tokens)

    def make_step() -> list[EngineCoreOutput]:
        outputs = [EngineCoreOutput(request_id=i, new_token_ids=[rng.choice(vocabulary)]) for i in ids]
        if params.logprobs is not None:
            for output in outputs:
                best = rng.sample(vocabulary, params.logprobs)
                output.logprobs = [TokenLogprobs([*output.new_token_ids, *best], [-1.0] * (len(best) + 1), 3)]
        return outputs

    for output in make_step():
        output.new_token_ids = [rng.choice(vocabulary) for _ in range(num_before)]
        output.logprobs = None
        processor.process([output], 0.0)
    steps = [make_step() for _ in range(max(1, TOKENS // num_requests))]
    started = time.perf_counter()
    for step in steps:
        processor.process(step, 1.0)
        for group in groups:
            group.take()
    return (time.perf_counter() - started) / (len(steps) * num_requests) * 1e6


def best_of(work: Callable[[], float]) -> tuple[float, float]:
    """The least of a few runs, and of the calibration loop between them: what both cost when nothing disturbs them."""
    pairs = [(work(), min(calibrate() for _ in range(3))) for _ in range(ROUNDS)]
    return min(cost for cost, _ in pairs), min(unit for _, unit in pairs)


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer to use")
    args = parser.parse_args()
    from headrace.entrypoints.async_engine import make_tokenizer
    from headrace.model_files.download import fetch_model
    from headrace.model_files.tokenizer import load_tokenizer

    tokenizer = make_tokenizer(load_tokenizer(fetch_model(args.model)))
    rows = []
    for name, options in CASES.items():
        for num_requests in (1, 64, 256):
            for num_before in (100, 8000) if num_requests == 64 else (100,):
                cost, unit = best_of(partial(measure, tokenizer, num_requests, options, num_before))
                row = {"case": name, "requests": num_requests, "before": num_before, "us": cost, "ratio": cost / unit}
                rows.append(row)
                place = f"{name:14} {num_requests:5} requests {num_before:5} before"
                print(f"{place} {cost:8.2f} us/token {cost / unit:8.1f}x")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
