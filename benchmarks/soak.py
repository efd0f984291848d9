"""Mixed load with hang-ups, aborts and bad requests, and the proof that nothing was lost.

A first part has no odd ends: the server's counters must equal the clients' own sums exactly. In the second anything
goes, for as long as asked: every stream must end in its proper way, a stream that is repeated all the time must never
change, memory must stay flat, and afterwards nothing may run, wait or hold a block.

    python benchmarks/soak.py [--seconds 60] [--clients 24] [--real] [--json FILE]

``--seconds 600`` is the long form. The executor is simulated unless ``--real``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from server_process import Server

MODEL = "m"
SETTINGS: dict[str, Any] = {
    "served_model_name": MODEL,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "num_kv_blocks": 48,
}
TIMEOUT_S = 60.0
REAL_TIMEOUT_S = 300.0
MEMORY_SLACK_MIB = 24.0
LOG_CHARS = 20_000
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
]
BAD: list[dict[str, Any]] = [
    {"n": 0},
    {"temperature": -1},
    {"max_tokens": -5},
    {"logit_bias": {"99999999": 1}},
    {"stop_token_ids": [1 << 40]},
    {"structured_outputs": {"regex": "("}},
    {"prompt": [[1] * 300]},
    {"prompt": []},
    {"unknown": 1},
    {"model": "other"},
]


@dataclass
class Sums:
    """What the clients saw."""

    prompt: int = 0
    generated: int = 0
    answers: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Client:
    """Sends random requests, one after another."""

    def __init__(self, http: httpx.AsyncClient, seed: int, sums: Sums) -> None:
        self._http = http
        self._random = random.Random(seed)
        self._sums = sums

    def _body(self) -> tuple[str, dict[str, Any]]:
        rng = self._random
        text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 30, 120])))
        body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.choice([1, 8, 40]), "n": rng.choice([1, 1, 1, 2, 3])}
        body |= rng.choice([{}, {"temperature": 0}, {"seed": 5}, {"stop": ["e", "zz"]}, {"ignore_eos": True}])
        if rng.random() < 0.5:
            prompt: Any = text if rng.random() < 0.7 else [text, "short"]
            return "/v1/completions", body | {"prompt": prompt} | rng.choice([{}, {}, {"logprobs": 2}, {"echo": True}])
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", body | {"messages": messages} | rng.choice([{}, {"logprobs": True}])

    async def send(self, *, odd: bool) -> None:
        """One request; ``odd`` ones may be wrong, or end in any way."""
        rng = self._random
        path, body = self._body()
        kind = rng.choices(["whole", "stream", "hang up", "abort", "bad"], [4, 4, 2, 1, 1] if odd else [1, 1, 0, 0, 0])[
            0
        ]
        self._sums.kinds[kind] += 1
        try:
            if kind == "bad":
                reply = await self._http.post("/v1/completions", json={"model": MODEL, "prompt": "a"} | rng.choice(BAD))
                self._check(reply.status_code in (400, 404), f"a bad request got {reply.status_code}")
            elif kind == "whole":
                await self._whole(path, body)
            elif kind == "stream":
                await self._stream(path, body, None, None)
            elif kind == "hang up":
                await self._stream(path, body, rng.randrange(4), None)
            else:
                await self._stream(path, body | {"request_id": f"r{rng.getrandbits(60)}"}, None, rng.random() * 0.05)
        except* httpx.HTTPError as group:
            for error in group.exceptions:
                self._check(False, f"{kind}: {error!r}")

    async def _whole(self, path: str, body: dict[str, Any]) -> None:
        reply = await self._http.post(path, json=body)
        if reply.status_code == 429:
            return
        self._check(reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:200]}")
        if reply.status_code == 200:
            self._count(reply.json()["usage"], len(reply.json()["choices"]))

    async def _stream(
        self, path: str, body: dict[str, Any], leave_after: int | None, abort_after: float | None
    ) -> None:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events: list[str] = []
        async with asyncio.TaskGroup() as group:
            if abort_after is not None:
                group.create_task(self._abort(body["request_id"], abort_after))
            async with self._http.stream("POST", path, json=body) as reply:
                if reply.status_code == 429:
                    return
                self._check(reply.status_code == 200, f"{path}: {reply.status_code}")
                async for line in reply.aiter_lines():
                    if line:
                        events.append(line[6:])
                    if leave_after is not None and len(events) > leave_after:
                        return
        if events[-1:] != ["[DONE]"]:
            self._check(False, f"{path}: a stream ended with {events[-1:]}")
        elif len(events) > 1:
            ended = [c["finish_reason"] for e in events[:-1] for c in json.loads(e)["choices"] if c["finish_reason"]]
            self._check(len(ended) == body["n"] * _num_prompts(body), f"{path}: {len(ended)} ends")
            if "abort" not in ended:
                self._count(json.loads(events[-2])["usage"], len(ended))

    async def _abort(self, request_id: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._http.post("/inference/v1/abort_requests", json={"request_ids": [request_id]})

    def _count(self, usage: dict[str, int], num_answers: int) -> None:
        self._sums.prompt += usage["prompt_tokens"]
        self._sums.generated += usage["completion_tokens"]
        self._sums.answers += num_answers

    def _check(self, right: bool, message: str) -> None:
        if not right:
            self._sums.faults.append(message)


def _num_prompts(body: dict[str, Any]) -> int:
    return len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1


async def canary(http: httpx.AsyncClient) -> str:
    """A greedy answer that nothing may change."""
    body = {"model": MODEL, "prompt": "canary", "temperature": 0, "max_tokens": 12, "seed": 1, "ignore_eos": True}
    text: str = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    return text


async def counters(http: httpx.AsyncClient) -> dict[str, float]:
    """All series of ``/metrics``, summed over their labels, and the ends by reason."""
    found: Counter[str] = Counter()
    for line in (await http.get("/metrics")).text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
            if name.startswith("vllm:request_success_total"):
                found[f"ended {name.split('finished_reason=')[1].split(chr(34))[1]}"] += float(value)
    return dict(found)


async def settled(http: httpx.AsyncClient) -> dict[str, float]:
    """The counters once nothing runs, waits or holds a block; raises when that does not come."""
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + 30
    while True:
        now = await counters(http)
        if not any(now[name] for name in gauges):
            return now
        if time.monotonic() > deadline:
            raise SystemExit(f"not idle after the load: {[(name, now[name]) for name in gauges]}")
        await asyncio.sleep(0.1)


@dataclass
class Soak:
    """One run; ``faults`` says what was wrong."""

    server: Server
    http: httpx.AsyncClient
    args: argparse.Namespace
    faults: list[str] = field(default_factory=list)
    memory: list[list[float]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> None:
        """Both parts."""
        self.right = await canary(self.http)
        await self._exact()
        await self._mixed()
        self.report |= {"faults": self.faults[:20], "num_faults": len(self.faults)}

    async def _exact(self) -> None:
        before, sums = await settled(self.http), Sums()
        clients = [Client(self.http, seed, sums) for seed in range(self.args.clients)]

        async def play(client: Client) -> None:
            for _ in range(self.args.exact):
                await client.send(odd=False)

        await asyncio.gather(*map(play, clients))
        after = await settled(self.http)
        self.faults += sums.faults
        ended = after.get("ended stop", 0) + after.get("ended length", 0)
        ended -= before.get("ended stop", 0) + before.get("ended length", 0)
        for name, mine, theirs in (
            ("prompt tokens", sums.prompt, _rise(before, after, "vllm:prompt_tokens_total")),
            ("generated tokens", sums.generated, _rise(before, after, "vllm:generation_tokens_total")),
            ("answers", sums.answers, ended),
        ):
            self._check(mine == theirs, f"{name}: the clients counted {mine}, the server {theirs:.0f}")
        self.report["exact"] = {"prompt": sums.prompt, "generated": sums.generated, "answers": sums.answers}

    async def _mixed(self) -> None:
        before, sums = await settled(self.http), Sums()
        stop = time.monotonic() + self.args.seconds

        async def play(seed: int) -> None:
            client = Client(self.http, seed, sums)
            while time.monotonic() < stop:
                await client.send(odd=True)

        async def watch() -> None:
            while time.monotonic() < stop:
                self._check(await canary(self.http) == self.right, "the canary changed")
                self.memory.append(self.server.memory_mib())
                await asyncio.sleep(min(1.0, self.args.seconds / 30))

        await asyncio.gather(watch(), *(play(1000 + seed) for seed in range(self.args.clients)))
        after = await settled(self.http)
        self.faults += sums.faults
        num_canaries = len(self.memory)
        ended = after.get("ended stop", 0) + after.get("ended length", 0)
        ended -= before.get("ended stop", 0) + before.get("ended length", 0)
        generated = _rise(before, after, "vllm:generation_tokens_total")
        self._check(ended >= sums.answers + num_canaries, f"{ended:.0f} ends for {sums.answers} answers")
        self._check(generated >= sums.generated + 12 * num_canaries, "fewer tokens counted than delivered")
        self._check(not after.get("ended error", 0), f"{after.get('ended error', 0):.0f} requests ended with an error")
        self._check_memory()
        self.report |= {
            "seconds": self.args.seconds,
            "requests": dict(sums.kinds),
            "answers": sums.answers,
            "aborted": after.get("ended abort", 0) - before.get("ended abort", 0),
            "preemptions": _rise(before, after, "vllm:num_preemptions_total"),
            "generated": generated,
            "memory_mib": [[round(mib, 1) for mib in row] for row in self.memory[:: max(1, len(self.memory) // 10)]],
        }

    def _check_memory(self) -> None:
        """The last third is no larger than the second, beyond what allocators keep."""
        third = max(1, len(self.memory) // 3)
        for place, name in enumerate(("server", "engine core")):
            middle = max(row[place] for row in self.memory[third : 2 * third] or self.memory)
            last = max(row[place] for row in self.memory[-third:])
            self._check(last <= middle + MEMORY_SLACK_MIB, f"the {name} grew from {middle:.0f} to {last:.0f} MiB")

    def _check(self, right: bool, message: str) -> None:
        if not right:
            self.faults.append(message)


def _rise(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


async def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        step_s = None if args.real else 0.001
        server = Server(Path(folder) / "log", model=args.model, step_s=step_s, **SETTINGS)
        limits = httpx.Limits(max_connections=2 * args.clients + 4)
        timeout_s = REAL_TIMEOUT_S if args.real else TIMEOUT_S
        async with httpx.AsyncClient(base_url=server.url, timeout=timeout_s, limits=limits, trust_env=False) as http:
            soak = Soak(server, http, args)
            try:
                await soak.run()
            finally:
                status = server.stop()
        soak.report["exit_status"] = status
        if soak.faults or status:
            print((Path(folder) / "log").read_text()[-LOG_CHARS:], file=sys.stderr)
    print(json.dumps(soak.report, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(soak.report, indent=1) + "\n")
    return 1 if soak.faults or status else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the mixed part")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--exact", type=int, default=10, help="requests of each client in the exact part")
    parser.add_argument("--real", action="store_true", help="run the real model")
    parser.add_argument("--json", type=Path, help="write the results here too")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
