"""``headrace generate``.

examples:
  headrace generate "The capital of France is"
  headrace generate --max-tokens 200 --temperature 0.8 "Once upon a time"
  echo "Dear diary," | headrace generate -
  headrace generate --model ./my-model "def fib(n):"
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from headrace.config.flags import add_flags, settings_from_args
from headrace.entrypoints.cli.sampling_flags import add_sampling_flags, sampling_from_args

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("prompt", help="the text to continue; - reads standard input")
    add_sampling_flags(parser)
    add_flags(parser, skip=())


def run(args: argparse.Namespace) -> int:
    """Stream one continuation to standard output."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    asyncio.run(_generate(prompt, sampling_from_args(args), settings_from_args(args)))
    return 0


async def _generate(prompt: str, sampling: dict[str, Any], settings: dict[str, Any]) -> None:
    from headrace.entrypoints.cli.local_engine import local_engine
    from headrace.messages.sampling_params import RequestOutputKind, SamplingParams

    async with local_engine(settings) as llm:
        values = {**llm.input.defaults, "max_tokens": DEFAULT_MAX_TOKENS, **sampling}
        params = SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate(prompt, params):
            print(output.outputs[0].text, end="", flush=True)
    print()
