"""What watches a core: the flight recorder, the index of its blocks, and whoever follows the KV cache's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.clock import Clock
from headrace.config.sections import EngineConfig
from headrace.control.kv_cache.events import EventSink
from headrace.core.kv_events import EventTee, IndexSink
from headrace.observability.flight_recorder.block_index import BlockIndex
from headrace.observability.flight_recorder.recorder import FlightRecorder
from headrace.observability.flight_recorder.views import RecorderViews


@dataclass(frozen=True, slots=True)
class Watching:
    """Parts for `EngineCore`, under the names of its arguments."""

    recorder: FlightRecorder
    events: EventSink
    views: Mapping[str, Callable[[str | None], Any]]


def make_watching(config: EngineConfig, clock: Clock) -> Watching:
    """The watchers of a configuration."""
    recorder = FlightRecorder(BlockIndex(across_salts=config.observability.explain_across_salts))
    sinks: list[EventSink] = [IndexSink(recorder.index, lambda: recorder.step_id)]
    return Watching(recorder, EventTee(sinks), RecorderViews(recorder, clock).topics())
