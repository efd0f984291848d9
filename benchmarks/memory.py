"""What ``headrace serve`` holds in memory beside weights and KV blocks: proportional set size of all its processes.

``python benchmarks/memory.py [MODEL] [--num-streams N] [flags of serve]``

Proportional set size counts a page shared by N processes as 1/N in each. It is read from ``smaps``, mapping by mapping,
once when the server is ready, with no KV block touched, and again after work. The size of MODEL, when it is a file,
stands for the weights; KV blocks count as allocated, so keep them few enough (``--kv-mib``) that work touches them all.
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
import urllib.request
from collections import Counter
from pathlib import Path

from headrace.entrypoints.bench.client import BenchClient, Target
from headrace.entrypoints.bench.load import run_closed_loop
from headrace.entrypoints.bench.prompts import PromptShape, make_texts

MIB = 1 << 20
START_TIMEOUT_S = 120.0
SHOWN = 14


def children_of(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def map_pss(pid: int) -> Counter[str]:
    """Proportional bytes by mapping; anonymous memory is one name for each size class."""
    sizes: Counter[str] = Counter()
    name, kilobytes = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            fields = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in fields[0].split("-"))
            kilobytes = (last - first) >> 10
            name = fields[5] if len(fields) > 5 else f"anonymous of {_size_class(kilobytes)}"
        elif line.startswith("Pss:"):
            sizes[name] += int(line.split()[1]) << 10
    return sizes


def _size_class(kilobytes: int) -> str:
    for limit, name in ((1 << 10, "under 1 MiB"), (16 << 10, "1 to 16 MiB"), (1 << 40, "over 16 MiB")):
        if kilobytes < limit:
            return name
    raise AssertionError(kilobytes)


def report(pid: int, title: str, known: dict[str, int]) -> None:
    """Print the total, what is accounted for, and the largest mappings of each process."""
    maps = {child: map_pss(child) for child in children_of(pid)}
    total = sum(sum(sizes.values()) for sizes in maps.values())
    rest = total - sum(known.values())
    parts = ", ".join(f"{name} {size / MIB:.0f}" for name, size in known.items())
    print(f"{title}: {total / MIB:.0f} MiB in all; {parts}; beyond these {rest / MIB:.0f} MiB = {rest / 1e6:.0f} MB")
    for child, sizes in maps.items():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        print(f"  process {child} ({b' '.join(words[2:5]).decode()}): {sum(sizes.values()) / MIB:.0f} MiB")
        for name, size in sizes.most_common(SHOWN):
            print(f"    {size / MIB:8.1f}  {name}")


def read_json(url: str) -> dict[str, object]:
    """A GET, decoded."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: dict[str, object] = json.load(answer)
        return data


async def work(url: str, model: str, num_streams: int) -> None:
    """Streams at once, with prompts of mixed lengths."""
    texts = make_texts(num_streams, PromptShape(300, spread=0.8), 0)
    bodies = [json.dumps({"model": model, "prompt": text, "max_tokens": 32, "stream": True}).encode() for text in texts]
    records = await run_closed_loop(
        BenchClient(Target.from_url(url), 120.0), "/completions", bodies, num_streams, lambda record: None
    )
    failed = [record.message for record in records if record.error]
    assert not failed, failed[0]


def main() -> None:
    """Start a server, look, let it work, look again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-streams", type=int, default=32)
    parser.add_argument("--kv-mib", type=int, default=256, help="memory of KV blocks (default: %(default)s)")
    args, words = parser.parse_known_args()
    command = [sys.executable, "-m", "headrace.entrypoints.cli.main", "serve", *words, "--port", "0"]
    process = subprocess.Popen([*command, "--kv-cache-memory", f"{args.kv_mib}MiB"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        deadline, url = time.monotonic() + START_TIMEOUT_S, ""
        while not url and time.monotonic() < deadline:
            line = process.stderr.readline()
            if match := re.search(r"ready on (http://\S+)", line):
                url = match[1]
            assert line or process.poll() is None, "the server ended"
        model = str(read_json(f"{url}/v1/models")["data"][0]["id"])  # type: ignore[index]
        weights = {"weights": Path(words[0]).stat().st_size} if words and Path(words[0]).is_file() else {}
        report(process.pid, "idle", weights)
        asyncio.run(work(url, model, args.num_streams))
        report(process.pid, "after work", weights | {"KV blocks": args.kv_mib * MIB})
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


if __name__ == "__main__":
    main()
