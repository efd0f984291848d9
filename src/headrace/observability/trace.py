"""Steps and requests as a Chrome trace, which Perfetto opens: a track per request, one for steps, one for KV use.

Flows lead from a request to the steps that computed its prompt, or computed it again. Times are microseconds since the
first event, and events stand in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.observability.explain import CAUSES

_STEPS, _REQUESTS = 1, 2


def make_trace(view: dict[str, Any], name_of: Callable[[str], str] = str) -> dict[str, Any]:
    """The trace.

    Args:
        view: ``steps`` and ``requests`` as the flight recorder gives them.
        name_of: internal id to the name to show.
    """
    steps, requests = view["steps"], view["requests"]
    starts = [step["scheduled"] for step in steps] + [one["queued"] for one in requests]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = [
        _name("process_name", _STEPS, 0, "engine"),
        _name("process_name", _REQUESTS, 0, "requests"),
    ]
    lanes, lane_of = _assign_lanes(steps)
    events += [
        _name("thread_name", _STEPS, lane, "steps" if lane == 1 else f"steps {lane}") for lane in range(1, lanes + 1)
    ]
    for step in steps:
        events += _step_events(step, lane_of.get(step["step"], 1), zero)
    for track, one in enumerate(requests, 1):
        events += _request_events(one, track, zero, name_of)
    events += _flows(steps, requests, lane_of, zero)
    # Names first, and of what begins together the longer slice first, so that what it holds nests in it.
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _assign_lanes(steps: list[dict[str, Any]]) -> tuple[int, dict[int, int]]:
    """Steps in flight overlap, which slices of one track may not: each goes to the first track that is free."""
    ends: list[float] = []
    lane_of: dict[int, int] = {}
    for step in steps:
        if not step["committed"]:
            continue
        lane = next((index for index, end in enumerate(ends) if end <= step["scheduled"]), len(ends))
        ends[lane : lane + 1] = [step["committed"]]
        lane_of[step["step"]] = lane + 1
    return max(1, len(ends)), lane_of


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _step_events(step: dict[str, Any], lane: int, zero: float) -> list[dict[str, Any]]:
    start, end = step["scheduled"], step["committed"]
    usage = {"ph": "C", "name": "KV blocks in use, %", "pid": _STEPS, "ts": _us(start - zero)}
    queues = {"ph": "C", "name": "requests", "pid": _STEPS, "ts": _us(start - zero)}
    events: list[dict[str, Any]] = [
        usage | {"args": {"used": round(100 * step["kv_usage"], 2)}},
        queues | {"args": {"running": step["num_running"], "waiting": step["num_waiting"]}},
    ]
    if end:
        names = ("num_tokens", "graph_mode", "graph_reason", "waiting_reason", "blocks", "phases_ms")
        length = round(_us(end - zero) - _us(start - zero), 1)
        where = {"pid": _STEPS, "tid": lane, "ts": _us(start - zero), "dur": length}
        # What nobody told is left out: a recording has no graph modes.
        args = {name: step[name] for name in names if step[name] != ""}
        events.append({"ph": "X", "name": f"step {step['step']}", **where, "args": args})
    return events


def _flows(
    steps: list[dict[str, Any]], requests: list[dict[str, Any]], lane_of: dict[int, int], zero: float
) -> list[dict[str, Any]]:
    """An arrow for each chunk of a request, from its track to the step; both ends lie in a slice."""
    tracks = {one["request_id"]: (track, one["spans"]) for track, one in enumerate(requests, 1)}
    events: list[dict[str, Any]] = []
    for step in steps:
        if step["step"] not in lane_of:
            continue
        for request_id in step["chunks"]:
            track, spans = tracks.get(request_id, (0, ()))
            if not any(span["start"] <= step["scheduled"] < span["end"] for span in spans):
                continue
            flow = {"cat": "chunk", "name": "runs in", "id": len(events) // 2 + 1, "ts": _us(step["scheduled"] - zero)}
            events.append({"ph": "s", **flow, "pid": _REQUESTS, "tid": track})
            events.append({"ph": "f", "bp": "e", **flow, "pid": _STEPS, "tid": lane_of[step["step"]]})
    return events


def _request_events(
    one: dict[str, Any], track: int, zero: float, name_of: Callable[[str], str]
) -> list[dict[str, Any]]:
    base = {"pid": _REQUESTS, "tid": track}
    events = [_name("thread_name", _REQUESTS, track, name_of(one["request_id"]))]
    for span in one["spans"]:
        # From two rounded ends, so that neighbours never overlap.
        start = _us(span["start"] - zero)
        length = round(_us(span["end"] - zero) - start, 1)
        detail = {key: name_of(value) if key == "for" else value for key, value in span["detail"].items()}
        args = {"why": CAUSES.get(span["cause"], span["cause"]), "steps": span["num_steps"], **detail}
        events.append({"ph": "X", **base, "name": span["cause"], "ts": start, "dur": length, "args": args})
    return events
