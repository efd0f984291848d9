"""``headrace bench serve``: load on a running server of OpenAI's API.

examples:
  headrace bench serve --num-prompts 200 --request-rate 4
  headrace bench serve --concurrency 16 --input-len 256 --output-len 128
  headrace bench serve --request-rate 8 --burst 8 --prefix-len 512 --num-prefixes 4
  headrace bench serve --url http://host:8000 --endpoint chat --goodput ttft:500 tpot:50 \\
      --json run.json --plot run.png

With --request-rate requests come when they are due, however many still run
(open loop); without it --concurrency requests run at any time (closed loop).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from headrace.base.errors import ConfigError, HeadraceError
from headrace.config.env import api_key
from headrace.entrypoints.bench import report
from headrace.entrypoints.bench.arrivals import burst_arrivals, poisson_arrivals
from headrace.entrypoints.bench.client import BenchClient, RequestError, Target
from headrace.entrypoints.bench.flags import (
    add_output_flags,
    add_shape_flags,
    positive,
    positive_float,
    shape_from_args,
)
from headrace.entrypoints.bench.load import run_closed_loop, run_open_loop
from headrace.entrypoints.bench.prompts import make_texts, make_token_ids, spread_lengths
from headrace.entrypoints.bench.statistics import Goal, RequestRecord, summarize

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
CLIENT_LIMIT = 0.85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", default=api_key(), help="its API key (default: HEADRACE_API_KEY)")
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    parser.add_argument("--endpoint", choices=list(PATHS), default="completions", help="(default: %(default)s)")
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive, default=100, metavar="N", help="(default: %(default)s)")
    load.add_argument("--request-rate", type=positive_float, metavar="X", help="requests per second, on average")
    load.add_argument("--burst", type=positive, metavar="N", help="requests come N at a time, not one by one at random")
    load.add_argument("--concurrency", type=positive, metavar="N", help="requests at any time (default: 16)")
    load.add_argument("--timeout-s", type=positive_float, default=600.0, metavar="X", help="(default: %(default)s)")
    add_shape_flags(parser)
    parser.add_argument(
        "--prompt-format",
        choices=["text", "tokens"],
        default="text",
        help="tokens have exact lengths, where the server takes ids as completion prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="always make the whole output, where servers allow it"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: %(default)s)")
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests within limits of ttft, tpot, e2e"
    )
    add_output_flags(parser, plot=True)


def run(args: argparse.Namespace) -> int:
    """Send the load; returns 1 when no request succeeded."""
    import uvloop

    goal = parse_goal(args.goodput)
    if args.request_rate is None and args.burst is not None:
        raise ConfigError("--burst needs --request-rate")
    if args.request_rate is not None and args.concurrency is not None:
        raise ConfigError("--request-rate and --concurrency exclude each other: an open loop does not wait")
    if args.endpoint == "chat" and args.prompt_format == "tokens":
        raise ConfigError("--prompt-format tokens needs --endpoint completions")
    if args.plot is not None:
        report.check_plots()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records, busy_share = runner.run(_run(args))
    start, end = min(r.due for r in records), max(r.end for r in records)
    summary = summarize(records, goal, end - start)
    summary["client_cpu_share"] = busy_share
    print(report.as_table(summary))
    for kind in summary["errors"]:
        example = next(record.message for record in records if record.error == kind)
        print(f"{kind}: {example[:300]}", file=sys.stderr)
    if busy_share > CLIENT_LIMIT:
        print(f"warning: this client used {busy_share:.0%} of a core and may be what was measured", file=sys.stderr)
    if args.json is not None:
        hidden = ("api_key", "json", "plot", "run_benchmark")
        settings = {key: value for key, value in vars(args).items() if key not in hidden}
        report.write_json(
            args.json, "serve", settings, summary, requests=[_as_data(record, start) for record in records]
        )
    if args.plot is not None:
        report.write_plot(args.plot, records, start)
    return 0 if summary["num_completed"] else 1


def parse_goal(words: Sequence[str]) -> Goal:
    """Limits from ``name:milliseconds``.

    Raises:
        ConfigError: an unknown name or not a number.
    """
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2e"):
                raise ValueError
            limits[f"{name}_ms"] = positive_float(value)
        except (ValueError, argparse.ArgumentTypeError):
            raise ConfigError(f"--goodput {word}: needs ttft:MS, tpot:MS or e2e:MS") from None
    return Goal(**limits)


async def _run(args: argparse.Namespace) -> tuple[list[RequestRecord], float]:
    """Records, and the share of a core that this client used."""
    client = BenchClient(Target.from_url(args.url, args.api_key), args.timeout_s)
    model = args.model or await find_model(client, args.url)
    bodies = make_bodies(args, model)
    path = PATHS[args.endpoint]
    cpu, wall = time.process_time(), time.perf_counter()
    with tqdm(total=len(bodies), desc="Requests", unit="request", dynamic_ncols=True) as bar:

        def on_done(record: RequestRecord) -> None:
            if record.error is not None:
                bar.set_postfix_str(f"last failure: {record.error}", refresh=False)
            bar.update()

        if args.request_rate is None:
            records = await run_closed_loop(client, path, bodies, args.concurrency or 16, on_done)
        else:
            if args.burst is None:
                arrivals = poisson_arrivals(len(bodies), args.request_rate, args.bench_seed)
            else:
                arrivals = burst_arrivals(len(bodies), args.request_rate, args.burst)
            records = await run_open_loop(client, path, bodies, arrivals, on_done)
    return records, (time.process_time() - cpu) / (time.perf_counter() - wall)


async def find_model(client: BenchClient, url: str) -> str:
    """The first model that the server lists.

    Raises:
        HeadraceError: the server cannot be asked.
    """
    try:
        listing = msgspec.json.decode(await client.get("/models"))
        return str(listing["data"][0]["id"])
    except RequestError as error:
        raise HeadraceError(f"cannot ask {url} for its models: {error}; is the server running?") from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise HeadraceError(f"{url} lists no models; name one with --model") from None


def make_bodies(args: argparse.Namespace, model: str) -> list[bytes]:
    """The requests' bodies, which the seed decides."""
    shape, num = shape_from_args(args), args.num_prompts
    prompts: Sequence[Any]
    if args.prompt_format == "tokens":
        prompts = make_token_ids(num, shape, args.bench_seed)
    else:
        prompts = make_texts(num, shape, args.bench_seed)
    lengths = spread_lengths(num, args.output_len, args.spread, args.bench_seed + 1)
    common: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": args.temperature,
    }
    if args.ignore_eos:
        common["ignore_eos"] = True
    bodies = []
    for prompt, length in zip(prompts, lengths, strict=True):
        asked = {"messages": [{"role": "user", "content": prompt}]} if args.endpoint == "chat" else {"prompt": prompt}
        bodies.append(msgspec.json.encode(common | asked | {"max_tokens": length}))
    return bodies


def _as_data(record: RequestRecord, start: float) -> dict[str, Any]:
    return {
        "due_s": record.due - start,
        "sent_s": record.sent - start,
        "token_times_s": [round(at - start, 6) for at in record.token_times],
        "end_s": record.end - start,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_output_tokens": record.num_output_tokens,
        "error": record.error,
    }
