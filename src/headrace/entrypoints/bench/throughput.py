"""``headrace bench throughput``: how fast many prompts are done, in process and without a server.

examples:
  headrace bench throughput
  headrace bench throughput --num-prompts 200 --input-len 256 --output-len 64 --spread 0.5
  headrace bench throughput --prefix-len 512 --num-prefixes 4 --max-num-seqs 32
"""

from __future__ import annotations

import argparse
import time

from headrace.config.flags import add_flags, settings_from_args
from headrace.entrypoints.bench import report
from headrace.entrypoints.bench.flags import add_output_flags, add_shape_flags, positive, shape_from_args
from headrace.entrypoints.bench.prompts import make_token_ids, spread_lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="what to run (default: smollm2-135m)")
    parser.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    add_shape_flags(parser)
    add_output_flags(parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Time one run over all prompts, after a short one that warms up."""
    from headrace.entrypoints.llm import LLM
    from headrace.messages.sampling_params import SamplingParams

    settings = {"model": "smollm2-135m", "log_level": "warning", **settings_from_args(args)}
    with LLM(**settings) as llm:
        vocab_size = llm.config.architecture.vocab_size
        prompts = make_token_ids(args.num_prompts, shape_from_args(args), args.bench_seed, vocab_size)
        lengths = spread_lengths(args.num_prompts, args.output_len, args.spread, args.bench_seed + 1)
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
    num_prompt, num_output = sum(map(len, prompts)), sum(lengths)
    summary = {
        "duration_s": seconds,
        "num_completed": len(outputs),
        "num_failed": 0,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "num_output_tokens": num_output,
        "requests_per_s": len(outputs) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_prompt + num_output) / seconds,
    }
    print(report.as_table(summary))
    if args.json is not None:
        shape = {key: getattr(args, key) for key in ("num_prompts", "input_len", "output_len", "spread", "prefix_len")}
        report.write_json(args.json, "throughput", settings | shape, summary)
    return 0
