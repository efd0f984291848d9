"""What happens to findable blocks, as records for a publisher. The control plane only collects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.control.kv_cache.hashing import ExtraKey


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that became findable, in chain order. ``parent_hash`` is ``None`` for the first block of a chain.

    ``extra_keys`` are those of the whole chain. ``owner`` is whose request computed them.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    group_id: int
    extra_keys: tuple[ExtraKey, ...] = ()
    owner: str | None = None


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
