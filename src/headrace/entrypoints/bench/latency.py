"""``headrace bench latency``: how long one batch takes, in process and without a server.

examples:
  headrace bench latency
  headrace bench latency --batch-size 8 --input-len 32 --output-len 128
  headrace bench latency ./model.gguf --input-len 1024 --output-len 1 --num-iters 5

Every prompt of the batch starts at once. Prefixes are forgotten between rounds,
so that each one computes all of its prompts.
"""

from __future__ import annotations

import argparse
import time

from headrace.config.flags import add_flags, settings_from_args
from headrace.entrypoints.bench import report
from headrace.entrypoints.bench.flags import add_output_flags, add_shape_flags, positive, shape_from_args
from headrace.entrypoints.bench.prompts import make_token_ids, spread_lengths
from headrace.entrypoints.bench.statistics import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="what to run (default: smollm2-135m)")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument("--num-iters", type=positive, default=10, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--num-warmup", type=positive, default=2, metavar="N", help="uncounted (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="profile one more round and say where its trace lies")
    add_shape_flags(parser)
    add_output_flags(parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Time the rounds."""
    from tqdm import tqdm

    from headrace.entrypoints.llm import LLM
    from headrace.messages.sampling_params import SamplingParams

    settings = {"model": "smollm2-135m", "log_level": "warning", **settings_from_args(args)}
    with LLM(**settings) as llm:
        vocab_size = llm.config.architecture.vocab_size
        prompts = make_token_ids(args.batch_size, shape_from_args(args), args.bench_seed, vocab_size)
        lengths = spread_lengths(args.batch_size, args.output_len, args.spread, args.bench_seed + 1)
        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        seconds = []
        for _ in tqdm(range(args.num_warmup + args.num_iters), desc="Rounds", unit="round", dynamic_ncols=True):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        if args.profile:
            llm.start_profile()
            llm.generate(prompts, params, use_tqdm=False)
            print(f"profile: {llm.stop_profile()}")
    counted = seconds[args.num_warmup :]
    mean = sum(counted) / len(counted)
    summary = {
        "batch_ms": describe(counted, 1e3),
        "output_tokens_per_s": sum(lengths) / mean,
        "total_tokens_per_s": (sum(lengths) + sum(map(len, prompts))) / mean,
    }
    print(report.as_table(summary))
    if args.json is not None:
        shape = {key: getattr(args, key) for key in ("batch_size", "input_len", "output_len", "spread", "prefix_len")}
        report.write_json(args.json, "latency", settings | shape, summary, rounds_s=counted)
    return 0
