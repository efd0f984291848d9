"""What the dashboard shows: a tick per second with what changed, and once what stays.

The cost is bounded: a tick asks the core three short questions, holds a bounded number of steps and requests, and only
so many pages may follow at once. A feed ends when the server drains.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import QueueFullError
from headrace.entrypoints.cli.explain_config import explained
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.insight import ask, describe_requests
from headrace.entrypoints.openai.sse import EventStream, event
from headrace.messages.outputs import SchedulerStats
from headrace.observability.instruments import Histogram

TICK_S = 1.0
WINDOW_TICKS = 60
MAX_FOLLOWERS = 8
MAX_STEPS = 120
MAX_GRANTS = 32
MAX_PREEMPTED = 16
MAX_REQUESTS = 40
MAX_BLOCKS = 65_536


class Feed:
    """Makes ticks for one follower."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._last_step: str | None = None
        self._totals: tuple[float, float, float] | None = None
        metrics = context.metrics
        self._recent = {"ttft": Recent(metrics.ttft), "gap": Recent(metrics.gap)}

    async def tick(self) -> dict[str, Any]:
        """Everything that changed since the last one."""
        metrics = self._context.metrics
        steps = await ask(self._context, "steps", self._last_step)
        blocks = await ask(self._context, "kv_blocks")
        stats = await ask(self._context, "stats")
        if steps:
            self._last_step = str(steps[-1]["step"])
        generated, prompt = metrics.generation_tokens.totals[""], metrics.prompt_tokens.totals[""]
        out_rate, in_rate = self._rates(generated, prompt)
        return {
            "steps": [self._describe_step(step) for step in steps[-MAX_STEPS:]],
            "blocks": b64encode(blocks[:MAX_BLOCKS]).decode(),
            # What is zero does not travel.
            "stats": msgspec.structs.asdict(msgspec.convert(stats, SchedulerStats)),
            "totals": {"generation_tokens": generated, "prompt_tokens": prompt},
            "tokens_per_s": out_rate,
            "prompt_tokens_per_s": in_rate,
            "latency": {name: recent.percentiles() for name, recent in self._recent.items()},
            "requests": await describe_requests(self._context, MAX_REQUESTS),
        }

    def _describe_step(self, step: dict[str, Any]) -> dict[str, Any]:
        """A step with its largest grants, under the clients' names."""
        name_of = self._context.llm.marks.name_of
        granted = sorted((step["granted"] or {}).items(), key=lambda item: -item[1])[:MAX_GRANTS]
        preempted = step["preempted"][:MAX_PREEMPTED]
        names = ("step", "num_tokens", "num_running", "num_waiting", "waiting_reason", "phases_ms")
        return {
            **{name: step[name] for name in (*names, "graph_mode", "graph_reason")},
            "granted": [[name_of(request_id), count] for request_id, count in granted],
            "num_requests": len(step["granted"] or ()),
            "length_ms": 1e3 * max(0.0, step["committed"] - step["scheduled"]),
            "skipped": Counter(step["skipped"].values()).most_common(),
            "preempted": [one | {"victim": name_of(one["victim"]), "for": name_of(one["for"])} for one in preempted],
        }

    def _rates(self, generated: float, prompt: float) -> tuple[float, float]:
        """Tokens per second out and in since the last tick."""
        now = self._context.llm.now()
        before, self._totals = self._totals, (now, generated, prompt)
        if before is None or now <= before[0]:
            return 0.0, 0.0
        seconds = now - before[0]
        return (generated - before[1]) / seconds, (prompt - before[2]) / seconds


class Recent:
    """Percentiles of what a histogram counted in the last minute, or of all while there was nothing in it."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._earlier: deque[list[int]] = deque([histogram.dump()[0]], maxlen=WINDOW_TICKS)

    def percentiles(self) -> dict[str, Any] | None:
        """The median, the 95th and the 99th, and of what; ``None`` before there is anything."""
        before = self._earlier[0]
        self._earlier.append(self._histogram.dump()[0])
        for of, counts in (("last minute", before), ("since the start", None)):
            found = [self._histogram.quantile(share, counts) for share in (0.5, 0.95, 0.99)]
            if None not in found:
                return {"of": of, "values": found}
        return None


async def follow(context: ServerContext, request: Request) -> Response:
    """``GET /v1/dashboard/feed``."""
    if context.num_followers >= MAX_FOLLOWERS:
        message = f"{MAX_FOLLOWERS} dashboards follow this server already"
        raise QueueFullError(message, retry_after_s=5.0, limit="dashboards")
    return EventStream(b"", _ticks(context))


async def _ticks(context: ServerContext) -> AsyncGenerator[bytes, None]:
    context.num_followers += 1
    try:
        feed = Feed(context)
        while not context.draining:
            yield event(await feed.tick())
            await asyncio.sleep(TICK_S)
    finally:
        context.num_followers -= 1


async def setup(context: ServerContext, request: Request) -> Response:
    """``GET /v1/dashboard/setup``: the configuration with reasons, the choices made, the start-up."""
    llm = context.llm
    value = {
        "model": context.model_name,
        "max_model_len": context.max_model_len,
        "config": [{"name": name, "value": value, "reason": why} for name, value, why in explained(llm.config)],
        "attention": await ask(context, "attention"),
        "graphs": await ask(context, "graphs"),
        "start_up_ms": context.start_up_ms,
        "engine_ms": llm.ready.phases_ms,
    }
    return Response(msgspec.json.encode(value), media_type="application/json")
