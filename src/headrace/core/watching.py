"""What watches a core: the flight recorder, the index of its blocks, a recording, who follows KV cache events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.clock import Clock
from headrace.config.sections import EngineConfig
from headrace.control.kv_cache.events import EventSink
from headrace.control.scheduler.scheduler import Scheduler
from headrace.core.kv_events import EventTee, IndexSink, ResidencySink
from headrace.core.kv_publisher import KVEventPublisher, parse_kv_events_config
from headrace.observability.flight_recorder.block_index import BlockIndex
from headrace.observability.flight_recorder.block_residency import BlockResidency
from headrace.observability.flight_recorder.recorder import FlightRecorder
from headrace.observability.flight_recorder.views import RecorderViews


@dataclass(frozen=True, slots=True)
class Watching:
    """Parts for `EngineCore`, under the names of its arguments."""

    recorder: FlightRecorder
    events: EventSink
    views: Mapping[str, Callable[[str | None], Any]]
    make_scheduler: Callable[..., Scheduler]
    after_step: Sequence[Callable[[], None]]
    closers: Sequence[Callable[[], None]]

    def parts(self) -> dict[str, Any]:
        """The arguments."""
        return {name: getattr(self, name) for name in self.__slots__}


def make_watching(config: EngineConfig, clock: Clock) -> Watching:
    """The watchers of a configuration.

    Raises:
        ConfigError: a file or an address that cannot be used.
    """
    settings = config.observability
    residency = BlockResidency(settings.kv_block_sample)
    recorder = FlightRecorder(BlockIndex(across_salts=settings.explain_across_salts), residency=residency)
    sinks: list[EventSink] = [IndexSink(recorder.index, lambda: recorder.step_id)]
    if residency.active:
        sinks.append(ResidencySink(residency, clock))
    closers: list[Callable[[], None]] = []
    make_scheduler: Callable[..., Scheduler] = Scheduler  # type: ignore[no-redef]
    if settings.record is not None:
        from headrace.core.recording import RecordingScheduler, RecordWriter

        writer = RecordWriter(settings.record)

        def make_scheduler(*arguments: Any, **parts: Any) -> Scheduler:
            scheduler = RecordingScheduler(writer, *arguments, **parts)
            closers.append(scheduler.close)
            return scheduler

    after_step: list[Callable[[], None]] = []
    events = parse_kv_events_config(settings.kv_events_config)
    if events.active:
        publisher = KVEventPublisher(events, clock)
        sinks.append(publisher)
        after_step.append(publisher.flush)
        closers.append(publisher.close)
    views = RecorderViews(recorder, clock).topics()
    return Watching(recorder, EventTee(sinks), views, make_scheduler, after_step, closers)
