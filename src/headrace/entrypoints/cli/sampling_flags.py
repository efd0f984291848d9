"""Sampling flags of the terminal commands."""

from __future__ import annotations

import argparse
from typing import Any

_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "temperature": (float, "0 takes the likeliest token each time"),
    "top_p": (float, "sample from the likeliest tokens with this share"),
    "top_k": (int, "sample from this many likeliest tokens"),
    "seed": (int, "the same seed gives the same answer"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add them; a flag that is not given leaves its value to the model."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in _FLAGS.items():
        # The engine's own seed has the flag --seed already.
        flag = "--sampling-seed" if name == "seed" else "--" + name.replace("_", "-")
        group.add_argument(
            flag, dest=f"sampling_{name}", type=kind, default=None, metavar=kind.__name__[0].upper(), help=text
        )
    group.add_argument("--stop", dest="sampling_stop", action="append", metavar="TEXT", help="end before this text")


def sampling_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The values that were given, by the names of the API."""
    values = {name: getattr(args, f"sampling_{name}") for name in (*_FLAGS, "stop")}
    return {name: value for name, value in values.items() if value is not None}
