"""What serving costs: the same prompts as 32 HTTP streams and offline through ``LLM``, in turns.

``python benchmarks/http_vs_offline.py [--model FILE] [--repeats 5] [--json FILE] [settings as name=value]``

Both engines are loaded with the same settings and run one at a time, each in a process of its own; the streams' client
runs in this one, on the same cores. Tokens per second count from the first request to the last token. Printed: the
medians and their ratio (target 0.90, stretch 0.95), and the processor time of the server process per token.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from server_process import Server

from headrace.entrypoints.bench.client import BenchClient, Target
from headrace.entrypoints.bench.statistics import RequestRecord

SETTINGS = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
ENGINES = Path(__file__).resolve().parent / "peers" / "engines"


class Offline:
    """``LLM`` in a process of its own, as the comparison with the peers runs it."""

    def __init__(self, model: str, threads: int, settings: dict[str, Any]) -> None:
        words = [f"{name}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            [sys.executable, "headrace_engine.py", model, str(threads), *words],
            cwd=ENGINES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the offline engine ended")
        return json.loads(line)

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds for all of them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def run_http(url: str, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds for one stream per prompt."""
    client = BenchClient(Target.from_url(url), 300.0)
    records = [RequestRecord(due=0.0) for _ in prompts]
    shared = {"model": "m", "stream": True, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    usage = {"stream_options": {"include_usage": True}}
    bodies = [json.dumps({**shared, **usage, "prompt": prompt}).encode() for prompt in prompts]
    began = time.perf_counter()
    streams = zip(bodies, records, strict=True)
    await asyncio.gather(*(client.stream("/completions", body, record) for body, record in streams))
    seconds = time.perf_counter() - began
    for record in records:
        assert record.error is None and record.num_output_tokens == max_tokens, record
    return seconds


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids of ordinary words."""
    rng = random.Random(seed)
    return [[rng.randrange(300, 40000) for _ in range(length)] for _ in range(count)]


def measure(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of every repeat, and what the server process used."""
    offline = Offline(args.model, args.threads, settings)
    with tempfile.TemporaryDirectory() as folder:
        names = {"model": args.model, "served_model_name": "m", "num_threads": args.threads}
        server = Server(Path(folder) / "log", **{**names, **SETTINGS, **settings, "step_s": None})
        rates: dict[str, list[float]] = {"offline": [], "http": []}
        num_tokens, cpu_s = args.streams * args.tokens, 0.0
        try:
            for repeat in range(-1, args.repeats):
                prompts = make_prompts(args.streams, args.prompt, repeat)
                before = server.cpu_s()
                seconds = asyncio.run(run_http(server.url, prompts, args.tokens))
                used_s = server.cpu_s() - before
                offline_s = offline.run(prompts, args.tokens)
                if repeat >= 0:
                    rates["http"].append(num_tokens / seconds)
                    rates["offline"].append(num_tokens / offline_s)
                    cpu_s += used_s
        finally:
            server.stop()
            offline.close()
    return {"tokens_per_second": rates, "server_us_per_token": 1e6 * cpu_s / (num_tokens * args.repeats)}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", help="settings of both engines, name=value")
    args = parser.parse_args()
    given = (word.split("=", 1) for word in args.settings)
    results = measure(args, {name: ast.literal_eval(value) for name, value in given})
    rates = results["tokens_per_second"]
    offline, http = median(rates["offline"]), median(rates["http"])
    ratios = [a / b for a, b in zip(rates["http"], rates["offline"], strict=True)]
    print(f"offline {offline:.0f} tokens/s, {args.streams} HTTP streams {http:.0f} tokens/s")
    print(f"ratio of medians {http / offline:.3f} (target 0.90, stretch 0.95)")
    print(f"ratios of the repeats {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"server process: {results['server_us_per_token']:.0f} us of processor time per token")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
