"""``headrace bench``.

examples:
  headrace bench serve --concurrency 16           load on a running server
  headrace bench latency --batch-size 8           time of one batch, in process
  headrace bench throughput --num-prompts 200     many prompts, in process

'headrace bench WHAT --help' explains each one.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

BENCHMARKS = {
    "latency": "time one batch in process",
    "throughput": "time many prompts in process",
    "serve": "put load on a server of OpenAI's API",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per benchmark; each fills its parser only when it is named."""
    chosen = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_LateParser)
    for name, text in BENCHMARKS.items():
        chosen.add_parser(name, help=text, benchmark=name)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    status: int = args.run_benchmark(args)
    return status


class _LateParser(argparse.ArgumentParser):
    """A parser that asks its benchmark's module for flags when it is used."""

    def __init__(self, *, benchmark: str, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self._benchmark: str | None = benchmark

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._benchmark is not None:
            module = import_module(f"headrace.entrypoints.bench.{self._benchmark}")
            text = BENCHMARKS[self._benchmark]
            self.description = text[:1].upper() + text[1:] + "."
            self.epilog = (module.__doc__ or "").partition("\n\n")[2]
            self._benchmark = None
            module.add_arguments(self)
            self.set_defaults(run_benchmark=module.run)
        return super().parse_known_args(args, namespace)
