"""``headrace run-batch``.

examples:
  headrace run-batch -i requests.jsonl -o answers.jsonl
  headrace run-batch model.gguf -i requests.jsonl -o answers.jsonl --max-num-seqs 64

Each input line is {"custom_id": …, "method": "POST", "url":
"/v1/chat/completions", "body": {…}}; each gets one output line in the same
place, an error where something is wrong with it. A run that was cut off goes
on where it was when the same command is given again. The exit status is 0
when every line was answered and 1 when some have errors.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.config.flags import add_flags, settings_from_args

PROGRESS_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="what to ask (default: smollm2-135m)")
    parser.add_argument("-i", "--input", required=True, type=Path, metavar="FILE", help="requests, one a line")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="answers, one a line")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished output")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the file."""
    if args.output.exists() and not args.overwrite:
        raise ConfigError(f"{args.output} exists; pass --overwrite to replace it")
    if not args.output.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {args.output.absolute().parent} for the output")
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from headrace.entrypoints.batch import BatchRun
    from headrace.entrypoints.cli.local_engine import local_engine
    from headrace.entrypoints.openai.context import ServerContext
    from headrace.entrypoints.openai.options import ServerOptions
    from headrace.observability.metrics import EngineMetrics

    total = _count_lines(args.input)
    async with local_engine(settings_from_args(args)) as llm:
        name = llm.config.model.served_model_name or llm.config.model.model
        context = ServerContext(llm, name, ServerOptions(), EngineMetrics(name, llm.config.max_model_len))
        with tqdm(total=total, unit="line", file=sys.stderr, disable=None) as bar:
            num_done, told = 0, time.monotonic()

            def advance() -> None:
                nonlocal num_done, told
                num_done += 1
                bar.update()
                # In a log there is a line now and then instead of a bar.
                if bar.disable and time.monotonic() - told >= PROGRESS_S:
                    told = time.monotonic()
                    print(f"{num_done} of {total} lines", file=sys.stderr, flush=True)

            window = 2 * llm.config.scheduler.max_num_seqs
            tally = await BatchRun(context, args.input, args.output, window, advance).run()
    print(f"{tally.num_lines} lines, {tally.num_failed} with errors: {args.output}", file=sys.stderr)
    return 1 if tally.num_failed else 0


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as source:
            return sum(1 for _ in source)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
