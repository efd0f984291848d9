"""``headrace explain``.

examples:
  headrace explain chatcmpl-4f1c
  headrace explain my-request --url http://host:8000 --api-key SECRET
  headrace explain my-request --json
  headrace explain my-request --prompt

ID is what the answer carried as its id or in its X-Request-Id header. The request may
still run; the newest thousand that ended are remembered.
"""

from __future__ import annotations

import argparse
import sys
from urllib.parse import quote

from headrace.entrypoints.cli.remote import add_server_arguments, get


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("id", help="the request's id")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    text = "show the prompt too, if your key sent it and the server runs with --explain-prompts"
    parser.add_argument("--prompt", action="store_true", help=text)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print why a request took its time."""
    form = "json" if args.json else "text"
    query = f"format={form}" + ("&prompt=true" if args.prompt else "")
    answer = get(args.url, args.api_key, f"/v1/requests/{quote(args.id, safe='')}/explain?{query}")
    sys.stdout.write(answer.decode().rstrip("\n") + "\n")
    return 0
