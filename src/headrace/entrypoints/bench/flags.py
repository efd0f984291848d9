"""Flags that the benchmarks share."""

from __future__ import annotations

import argparse
import math

from headrace.entrypoints.bench.prompts import PromptShape


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError("must be at least 0 and below 1")
    return value


def _at_least_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Lengths of prompts and outputs."""
    group = parser.add_argument_group("prompts")
    group.add_argument("--input-len", type=positive, default=128, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument("--output-len", type=positive, default=128, metavar="N", help="tokens (default: %(default)s)")
    group.add_argument(
        "--spread", type=_share, default=0.0, metavar="X", help="lengths vary by this share, up and down (default: 0)"
    )
    group.add_argument("--prefix-len", type=_at_least_0, default=0, metavar="N", help="tokens that prompts share")
    group.add_argument("--num-prefixes", type=positive, default=1, metavar="N", help="different shared prefixes")
    group.add_argument("--bench-seed", type=int, default=0, metavar="N", help="decides prompts and times")


def shape_from_args(args: argparse.Namespace) -> PromptShape:
    """What the shape flags say."""
    return PromptShape(args.input_len, args.spread, args.prefix_len, args.num_prefixes)


def add_output_flags(parser: argparse.ArgumentParser, *, plot: bool = False) -> None:
    """Where results go beside the terminal."""
    group = parser.add_argument_group("results")
    group.add_argument("--json", metavar="FILE", help="write settings, machine and results")
    if plot:
        group.add_argument("--plot", metavar="FILE", help='draw a PNG; needs pip install "headrace[bench]"')
