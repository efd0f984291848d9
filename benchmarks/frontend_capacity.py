"""How many streamed tokens per second one core of the server process carries.

The server is the real one in a process of its own; its engine core is another process whose executor is simulated, and
the clients are in this one. What counts is the processor time of the server process alone, so neither the core nor the
clients, nor anything else on the machine, changes the figure much: tokens per second of its own processor time.

    python benchmarks/frontend_capacity.py [--streams 1,64,256,1024] [--route chat] [--json FILE]
    python benchmarks/frontend_capacity.py --streams 256 --profile server.svg     (needs py-spy)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from server_process import Server

TOKENS_PER_STREAM = 128
PROFILE_S = 10
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


SETTINGS: dict[str, Any] = {
    "served_model_name": "m",
    "max_model_len": 256,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 4096,
    "num_kv_blocks": 1024 * 16 + 1,
    "enable_prefix_caching": False,
}


def make_request(route: str) -> bytes:
    body: dict[str, Any] = {"model": "m", "max_tokens": TOKENS_PER_STREAM, "ignore_eos": True, "stream": True}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if route == "chat" else {"prompt": "Hi"}
    data = json.dumps(body).encode()
    head = f"POST {PATHS[route]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


async def stream(port: int, request: bytes, rounds: int) -> int:
    """Answers one after another on one connection; returns the events of all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    events = 0
    for _ in range(rounds):
        writer.write(request)
        tail = b""
        while b"0\r\n\r\n" not in tail:
            data = await reader.read(1 << 16)
            if not data:
                raise SystemExit("the server hung up")
            events += data.count(b"data: {")
            tail = (tail + data)[-64:]
            if b"[DONE]" in data and tail.endswith(b"0\r\n\r\n"):
                break
    writer.close()
    return events


async def measure(server: Server, route: str, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """One load, after a small one that warms everything up."""
    request = make_request(route)
    await asyncio.gather(*(stream(server.port, request, 1) for _ in range(min(8, num_streams))))
    rounds = max(1, round(num_tokens / num_streams / TOKENS_PER_STREAM))
    cpu, wall = server.cpu_s(), time.perf_counter()
    events = sum(await asyncio.gather(*(stream(server.port, request, rounds) for _ in range(num_streams))))
    cpu, wall = server.cpu_s() - cpu, time.perf_counter() - wall
    tokens = num_streams * rounds * TOKENS_PER_STREAM
    return {
        "route": route,
        "streams": num_streams,
        "tokens": tokens,
        "tokens_per_core_s": round(tokens / cpu),
        "tokens_per_s": round(tokens / wall),
        "us_per_token": round(cpu / tokens * 1e6, 1),
        "tokens_per_event": round(tokens / events, 2),
    }


def run(args: argparse.Namespace) -> None:
    folder = tempfile.TemporaryDirectory()
    server = Server(Path(folder.name) / "log", model=args.model, **SETTINGS)
    rows = []
    try:
        profiler = None
        if args.profile:
            words = ["py-spy", "record", "-p", str(server.pid), "-d", str(PROFILE_S), "-r", "500", "-o", args.profile]
            profiler = subprocess.Popen([*words, "-f", "raw" if args.profile.endswith(".txt") else "flamegraph"])
        for num_streams in map(int, args.streams.split(",")):
            num_tokens = args.tokens if num_streams > 1 else args.tokens // 50
            row = asyncio.run(measure(server, args.route, num_streams, num_tokens))
            rows.append(row)
            print(
                f"{row['streams']:5} streams {row['tokens_per_core_s']:8,} tokens per second of one core"
                f" {row['us_per_token']:7.1f} us/token {row['tokens_per_event']:6.2f} tokens/event"
                f" {row['tokens_per_s']:8,} tokens/s here",
                flush=True,
            )
        if profiler is not None:
            profiler.wait()
    finally:
        server.stop()
        folder.cleanup()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer to use")
    parser.add_argument("--streams", default="1,64,256,1024", help="streams at once, one row each")
    parser.add_argument("--tokens", type=int, default=130_000, help="tokens of one row")
    parser.add_argument("--route", choices=PATHS, default="chat")
    parser.add_argument("--profile", help="record the server with py-spy to this file")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    run(args)


if __name__ == "__main__":
    main()
