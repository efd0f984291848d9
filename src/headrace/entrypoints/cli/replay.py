"""``headrace replay``.

examples:
  headrace replay decisions.rec
  headrace replay decisions.rec --json

FILE comes from serve --record FILE. Every decision of the scheduler is made again, without
a model, and compared; the exit status is 1 when one differs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("file", help="a recording")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")


def run(args: argparse.Namespace) -> int:
    """Repeat a recording."""
    from headrace.core.replay import Replay

    result = Replay(args.file).run()
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        print(f"{result.num_requests} requests, {result.num_steps} steps, {result.num_decisions} decisions compared")
        print("all decisions are the same" if result.difference is None else f"different: {result.difference}")
    return int(result.difference is not None)
