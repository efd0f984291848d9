"""Traces against the Chrome trace format, strictly: what a viewer would drop or draw wrong fails here."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from headrace.core.replay import trace_recording
from headrace.messages.requests import Query
from headrace.observability.trace import make_trace
from headrace.testing.requests import make_request
from tests.observability.test_replay import record_mixed
from tests.observability.watched_core import WatchedCore

Event = dict[str, Any]
FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def check_trace(trace: dict[str, Any]) -> None:
    """Raise unless every event is whole, slices of a track nest, and every arrow has two ends in slices."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid") if key in event)
        assert isinstance(event.get("ts", 0.0), float | int) and event.get("ts", 0.0) >= 0, event
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times), "events are out of order"
    check_names(events)
    for event in events:
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, float | int) for value in event["args"].values())
    check_flows(events, check_nesting(events))


def check_names(events: list[Event]) -> None:
    """Every track and process has one name."""
    named = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(named) == len(set(named)), "a track has two names"
    used = {(e["pid"], e["tid"]) for e in events if "tid" in e and e["ph"] != "M"}
    assert used <= {(pid, tid) for name, pid, tid in named if name == "thread_name"}
    assert {e["pid"] for e in events} == {pid for name, pid, _ in named if name == "process_name"}


def check_nesting(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Slices of each track, after checking that each begins after its neighbours or lies within one."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        opened: list[float] = []
        for start, end in slices:
            while opened and opened[-1] <= start + 1e-6:
                opened.pop()
            assert not opened or end <= opened[-1] + 1e-6, "slices of a track cross"
            opened.append(end)
    return tracks


def check_flows(events: list[Event], tracks: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    ends: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["cat"], event["id"]].append(event)
            slices = tracks[event["pid"], event["tid"]]
            assert any(start - 0.05 <= event["ts"] <= end + 0.05 for start, end in slices), f"in no slice: {event}"
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"], pair
        assert pair[0]["ts"] <= pair[1]["ts"] and pair[0]["name"] == pair[1]["name"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_live_core(depth: int) -> None:
    core = WatchedCore(
        num_kv_blocks=24, max_model_len=64, watermark=0.0, pipeline_depth=depth, max_num_batched_tokens=16
    )
    core.run(*(make_request(f"r{n}", [10 + n * 7 + i for i in range(24)], 12 + n) for n in range(6)))
    trace = make_trace(core.core.perform(Query(topic="trace")))
    check_trace(trace)
    events = trace["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"engine", "requests", "steps", *(f"r{n}" for n in range(6))} <= names
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"KV blocks in use, %", "requests"}
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"prefill", "decode", "preempted", "recompute"}
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) >= 12, "a prompt of 24 tokens takes two steps of 16"


def test_a_core_in_the_middle_of_its_work() -> None:
    core = WatchedCore(pipeline_depth=2)
    core.add(make_request("a", 10, 30), make_request("b", 10, 30))
    core.step(7)
    check_trace(make_trace(core.core.perform(Query(topic="trace"))))


def test_a_recording(tmp_path: Path) -> None:
    record_mixed(tmp_path / "a.rec", 40)
    check_trace(trace_recording(str(tmp_path / "a.rec")))


def test_nothing_so_far() -> None:
    check_trace(make_trace(WatchedCore().core.perform(Query(topic="trace"))))
