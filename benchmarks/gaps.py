"""What long prompts do to running streams: the real server over HTTP, with and without them.

``python benchmarks/gaps.py [MODEL] [--json FILE] [flags of serve]``

16 closed-loop streams run all the time. First alone, which gives the median gap between tokens; then a prompt of about
1,024 tokens arrives every 4 s. Printed: the 99th percentile of the gaps beside prompts over that median (target at most
2, stretch 1.5), and the longest wait of a prompt for its first token (target 8 s, stretch 4 s).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.entrypoints.bench.client import BenchClient, Target
from headrace.entrypoints.bench.load import run_open_loop
from headrace.entrypoints.bench.prompts import PromptShape, make_token_ids
from headrace.entrypoints.bench.statistics import RequestRecord

NUM_STREAMS = 16
STREAM_TOKENS = 256
PROMPT_TOKENS = 1024
PROMPT_EVERY_S = 4.0
WARM_UP_S = 3.0
START_TIMEOUT_S = 120.0


def make_body(prompt: Sequence[int], max_tokens: int) -> bytes:
    """A streamed completion."""
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    return json.dumps({"model": "bench", "stream": True, **asked}).encode()


async def keep_streaming(client: BenchClient, number: int, until: float, records: list[RequestRecord]) -> None:
    """One user: asks again whenever an answer is complete."""
    prompts = make_token_ids(200, PromptShape(32), 1000 + number)
    with suppress(TimeoutError):
        async with asyncio.timeout(until - time.perf_counter()):
            # Users who all end together would come back together: their first answers differ in length.
            for turn, prompt in enumerate(prompts):
                length = STREAM_TOKENS if turn else STREAM_TOKENS * (number + 1) // NUM_STREAMS
                record = RequestRecord(due=time.perf_counter())
                records.append(record)
                await client.stream("/completions", make_body(prompt, length), record)


async def measure(url: str, seconds: float, *, with_prompts: bool) -> tuple[np.ndarray, list[RequestRecord]]:
    """Gaps between the streams' tokens, and the records of the prompts."""
    client = BenchClient(Target.from_url(url), 120.0)
    start = time.perf_counter()
    until = start + WARM_UP_S + seconds
    streams: list[RequestRecord] = []
    prompts: list[RequestRecord] = []
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(keep_streaming(client, number, until, streams))
        if with_prompts:
            await asyncio.sleep(WARM_UP_S)
            arrivals = list(np.arange(0.0, seconds - PROMPT_EVERY_S / 2, PROMPT_EVERY_S))
            ids = make_token_ids(len(arrivals), PromptShape(PROMPT_TOKENS), int(start))
            bodies = [make_body(prompt, 2) for prompt in ids]
            prompts = await run_open_loop(client, "/completions", bodies, arrivals, lambda record: None)
    failed = [record.message for record in [*streams, *prompts] if record.error is not None]
    assert not failed, failed[0]
    # While all of them stream: neither the start nor the end, when streams run out.
    pairs = [pair for record in streams for pair in pairwise(record.token_times)]
    gaps = [b - a for a, b in pairs if a >= start + WARM_UP_S and b <= until]
    return np.array(gaps), prompts


def main() -> None:
    """Start a server and measure it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=16.0, help="of each measurement")
    parser.add_argument("--json", metavar="FILE")
    args, words = parser.parse_known_args()
    command = [sys.executable, "-m", "headrace.entrypoints.cli.main", "serve", *words, "--port", "0"]
    process = subprocess.Popen([*command, "--served-model-name", "bench"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        deadline, url = time.monotonic() + START_TIMEOUT_S, ""
        while not url and time.monotonic() < deadline:
            line = process.stderr.readline()
            if match := re.search(r"ready on (http://\S+)", line):
                url = match[1]
            assert line, "the server ended"
        alone, _ = asyncio.run(measure(url, args.seconds, with_prompts=False))
        beside, prompts = asyncio.run(measure(url, args.seconds, with_prompts=True))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    median = float(np.median(alone))
    waits = [record.first_token_s for record in prompts]
    p50, p90, p99 = (float(value) for value in np.percentile(beside, (50, 90, 99)))
    results = {
        "alone_ms": {"p50": 1e3 * median, "p99": 1e3 * float(np.percentile(alone, 99))},
        "beside_prompts_ms": {"p50": 1e3 * p50, "p90": 1e3 * p90, "p99": 1e3 * p99},
        "gap_ratio": p99 / median,
        "longest_wait_s": max(waits),
    }
    shown = {name: {k: round(v, 1) for k, v in row.items()} for name, row in results.items() if isinstance(row, dict)}
    print(f"gaps alone {shown['alone_ms']}, beside prompts {shown['beside_prompts_ms']}")
    print(f"p99 gap beside prompts / median gap alone: {results['gap_ratio']:.2f} (target 2, stretch 1.5)")
    print(f"longest wait of a prompt: {results['longest_wait_s']:.2f} s of {len(waits)} (target 8 s, stretch 4 s)")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
