"""``headrace pull``.

examples:
  headrace pull smollm2-135m
  headrace pull HuggingFaceTB/SmolLM2-135M-Instruct --revision main
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="alias or hub id (default: smollm2-135m)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit")


def run(args: argparse.Namespace) -> int:
    """Fetch and say where it is."""
    from headrace.base.logging import setup_logging
    from headrace.model_files.download import fetch_model

    setup_logging()
    print(fetch_model(args.model, args.revision))
    return 0
