"""Hands the KV cache's events to those who watch it, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.base.clock import Clock
from headrace.control.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventSink, KVEvent
from headrace.observability.flight_recorder.block_index import BlockIndex
from headrace.observability.flight_recorder.block_residency import BlockResidency


class IndexSink:
    """Keeps a `BlockIndex` informed.

    Args:
        index: of the flight recorder.
        step_id: gives the step that is being made.
    """

    def __init__(self, index: BlockIndex, step_id: Callable[[], int]) -> None:
        self._index = index
        self._step_id = step_id

    def emit(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                keys = tuple((key.kind, key.value) for key in event.extra_keys)
                tokens, size = event.token_ids, event.block_size
                self._index.stored(event.block_hashes, event.parent_hash, tokens, size, keys, event.owner)
            case BlockRemoved():
                self._index.removed(event.block_hash, self._step_id())
            case AllBlocksCleared():
                self._index.cleared(self._step_id())


class ResidencySink:
    """Keeps a `BlockResidency` informed.

    Args:
        residency: of the flight recorder.
        clock: dates the events.
    """

    def __init__(self, residency: BlockResidency, clock: Clock) -> None:
        self._residency = residency
        self._clock = clock

    def emit(self, event: KVEvent) -> None:
        now = self._clock.monotonic()
        match event:
            case BlockStored():
                self._residency.stored(event.block_hashes, now)
            case BlockRemoved():
                self._residency.removed(event.block_hash, now)
            case AllBlocksCleared():
                self._residency.cleared(now)


class EventTee:
    """Tells several sinks."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = sinks

    def emit(self, event: KVEvent) -> None:
        for sink in self._sinks:
            sink.emit(event)
