"""What happens to findable blocks, as records for a publisher. The control plane only collects them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from headrace.control.kv_cache.hashing import ExtraKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that became findable, in chain order. ``parent_hash`` is ``None`` for the first block of a chain.

    ``extra_keys`` are those of the whole chain.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    group_id: int
    extra_keys: tuple[ExtraKey, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block that is no longer findable."""

    block_hash: bytes
    group_id: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is findable any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventSink(Protocol):
    """Takes events in the order in which they happened."""

    def emit(self, event: KVEvent) -> None:
        """Take one event; never blocks."""
        ...


class NullEventSink:
    """Takes events and forgets them."""

    def emit(self, event: KVEvent) -> None:
        return None


class EventBuffer:
    """Keeps events until they are taken.

    Args:
        max_events: above this the oldest are dropped and counted in ``num_dropped``.
    """

    def __init__(self, max_events: int = 100_000) -> None:
        self._events: deque[KVEvent] = deque(maxlen=max_events)
        self.num_dropped = 0

    def emit(self, event: KVEvent) -> None:
        if len(self._events) == self._events.maxlen:
            self.num_dropped += 1
        self._events.append(event)

    def take(self) -> list[KVEvent]:
        """Return what came since the last call."""
        events = list(self._events)
        self._events.clear()
        return events
