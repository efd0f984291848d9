"""``headrace trace``.

examples:
  headrace trace http://127.0.0.1:8000 -o trace.json
  headrace trace decisions.rec -o trace.json

SOURCE is a running server or a file written by serve --record. Open the trace at
https://ui.perfetto.dev or in a browser's chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from headrace.base.errors import HeadraceError
from headrace.config.env import api_key
from headrace.entrypoints.cli.remote import get


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("source", help="URL of a server, or a recording")
    parser.add_argument("-o", "--output", default="trace.json", help="file to write (default: trace.json)")
    parser.add_argument("--api-key", default=api_key(), help="API key of the server (default: HEADRACE_API_KEY)")


def run(args: argparse.Namespace) -> int:
    """Write a trace."""
    if args.source.startswith(("http://", "https://")):
        data = get(args.source, args.api_key, "/v1/trace")
    else:
        from headrace.core.replay import trace_recording

        data = json.dumps(trace_recording(args.source)).encode()
    try:
        Path(args.output).write_bytes(data)
    except OSError as error:
        raise HeadraceError(f"cannot write {args.output}: {error.strerror}") from None
    print(f"{args.output}: {len(json.loads(data)['traceEvents'])} events; open it at https://ui.perfetto.dev")
    return 0
