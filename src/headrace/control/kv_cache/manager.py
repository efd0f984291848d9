"""`KVCacheManager`: the scheduler's whole view of KV blocks.

Owns the pool, the tables, the fences and the leases. Knows nothing of queues, budgets or time. Every block is at any
moment free, or owned by tables, fences or leases, as many times as its ``ref_count`` says.

Order of effects: `get_computed_blocks` only looks; `allocate_slots` changes everything or nothing; blocks become
findable in `cache_committed`, when the step that wrote them has been committed, and never before; `free` hands a
request's blocks to a fence while a step in flight still names them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from headrace.control.kv_cache.block import KVBlock
from headrace.control.kv_cache.block_pool import BlockPool
from headrace.control.kv_cache.coordinator import Coordinator
from headrace.control.kv_cache.events import BlockStored, EventSink, NullEventSink
from headrace.control.kv_cache.hashing import HashChain
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.scheduler_output import BlockIds


class CacheableRequest(Protocol):
    """What the manager reads of a request; it never writes."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def hash_chain(self) -> HashChain: ...

    @property
    def takes_hits(self) -> bool: ...


class BlockState(IntEnum):
    """What a block is to someone who looks at the cache; ``FREE`` holds nothing, ``CACHED`` has no owner but contents.

    ``SHARED`` has several owners; ``PENDING`` waits for a step in flight or a transfer.
    """

    NULL = 0
    FREE = 1
    CACHED = 2
    OWNED = 3
    SHARED = 4
    PENDING = 5


class ComputedBlocks(NamedTuple):
    """A local hit: the tables that give ``num_tokens`` tokens. Not owned until `allocate_slots` adopts it."""

    num_tokens: int
    blocks: tuple[list[KVBlock], ...]


@dataclass(slots=True)
class PrefixStats:
    """Totals since start, in tokens; first admissions only."""

    queries: int = 0
    hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    recompute_tokens: int = 0


class KVCacheManager:
    """Blocks of all requests.

    Args:
        config: the plan.
        max_model_len: no request gets slots beyond it.
        enable_prefix_caching: when off nothing is hashed and nothing hits.
        events: told what becomes findable and what no longer is.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        events: EventSink | None = None,
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self._events = events if events is not None else NullEventSink()
        self.pool = BlockPool(config.num_blocks, len(config.groups), self._events)
        self.coordinator = Coordinator(config, self.pool)
        self.stats = PrefixStats()
        self._no_hit = ComputedBlocks(0, tuple([] for _ in config.groups))
        self._fenced: deque[tuple[int, list[KVBlock]]] = deque()
        self._leased: dict[str, list[KVBlock]] = {}

    # Looking

    @property
    def usage(self) -> float:
        """Share of the blocks that have an owner."""
        return self.pool.usage

    @property
    def has_fenced(self) -> bool:
        """Whether blocks will come back when a step in flight is committed."""
        return bool(self._fenced)

    def get_computed_blocks(self, request: CacheableRequest) -> ComputedBlocks:
        """The longest local hit, leaving at least the last token to compute. Changes nothing."""
        if not self.enable_prefix_caching or not request.takes_hits:
            return self._no_hit
        num_tokens = len(request.token_ids)
        hashes = request.hash_chain.extend(request.token_ids, num_tokens)
        max_blocks = (num_tokens - 1) // self.block_size
        num_blocks, blocks = self.coordinator.find_longest_hit(hashes, max_blocks)
        return ComputedBlocks(num_blocks * self.block_size, blocks)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The request's tables; empty lists for one without blocks."""
        return self.coordinator.get_block_ids(request_id)

    def get_block_states(self) -> bytes:
        """A `BlockState` for each block, in the order of ids."""
        states = bytearray(len(self.pool.blocks))
        for block in self.pool.blocks[1:]:
            if block.ref_count == 0:
                states[block.block_id] = BlockState.FREE if block.block_hash is None else BlockState.CACHED
            else:
                states[block.block_id] = BlockState.OWNED if block.ref_count == 1 else BlockState.SHARED
        for blocks in (*(blocks for _, blocks in self._fenced), *self._leased.values()):
            for block in blocks:
                if block.ref_count == 1:
                    states[block.block_id] = BlockState.PENDING
        return bytes(states)

    def num_slots(self, request_id: str) -> int:
        """Tokens for which the request holds slots."""
        return self.coordinator.num_slots(request_id)

    def num_blocks_of_whole(self, request_id: str, num_tokens: int) -> int:
        """Blocks still to take until all ``num_tokens`` of a request with a table are computed."""
        return self.coordinator.num_missing_whole(request_id, 0, num_tokens)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of ``num_tokens``, prompt and output, can run to its end when nothing else does."""
        return self.coordinator.max_blocks(min(num_tokens, self.max_model_len)) <= self.pool.num_usable

    # Taking

    def allocate_slots(
        self,
        request: CacheableRequest,
        num_new_tokens: int,
        *,
        hit: ComputedBlocks | None = None,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        whole_tokens: int = 0,
        reserved_blocks: int = 0,
    ) -> BlockIds | None:
        """Give a request slots for all five parts of its sequence.

        ``comp`` (its ``num_computed_tokens``), ``new_comp`` (``hit``, for a request without blocks), ``ext_comp``
        (``num_external_tokens``, loaded by a connector), ``new`` (``num_new_tokens`` to compute now) and ``lookahead``
        (slots for drafts to come) follow each other.

        Args:
            whole_tokens: when not 0, succeed only if this many tokens could all be given slots now.
            reserved_blocks: free blocks that must remain.

        Returns:
            The ids added to each group's table beyond the hit, or ``None``, which changes nothing.
        """
        request_id = request.request_id
        computed = request.num_computed_tokens + num_external_tokens
        num_hit_blocks = num_revived = 0
        if hit is not None and hit.num_tokens:
            computed += hit.num_tokens
            num_hit_blocks = hit.num_tokens // self.block_size
            null = self.pool.null_block
            num_revived = sum(b.ref_count == 0 and b is not null for table in hit.blocks for b in table)
        total = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        coordinator = self.coordinator
        missing = coordinator.num_missing(request_id, num_hit_blocks, computed, total)
        if whole_tokens:
            missing = max(missing, coordinator.num_missing_whole(request_id, num_hit_blocks, whole_tokens))
        if missing + num_revived + reserved_blocks > self.pool.num_free:
            return None
        if hit is not None and hit.num_tokens:
            # Hit blocks leave the free queue before new ones are taken, or they could be taken themselves.
            coordinator.adopt(request_id, hit.blocks)
        return coordinator.append(request_id, computed, total)

    def record_admission(self, num_queried: int, num_hit: int) -> None:
        """Count one first admission."""
        self.stats.queries += num_queried
        self.stats.hits += num_hit

    def record_external(self, num_queried: int, num_hit: int) -> None:
        """Count what the connector was asked for, and what it had, at a first admission."""
        self.stats.external_queries += num_queried
        self.stats.external_hits += num_hit

    def record_recompute(self, num_tokens: int) -> None:
        """Count tokens that a preempted request computes a second time."""
        self.stats.recompute_tokens += num_tokens

    # Committing

    def cache_committed(self, request: CacheableRequest, num_tokens: int) -> None:
        """The first ``num_tokens`` of a request are certain and their KV is written: make full blocks findable.

        Blocks that fell out of every window are freed.
        """
        request_id = request.request_id
        if self.enable_prefix_caching:
            num_blocks = num_tokens // self.block_size
            chain = request.hash_chain
            hashes = chain.extend(request.token_ids, num_tokens)
            for group in self.coordinator.groups:
                stored = group.store(request_id, hashes, num_blocks)
                if stored is not None:
                    self._emit_stored(request, group.group_id, *stored)
        if self.coordinator.windowed:
            for group in self.coordinator.groups:
                group.drop_outside(request_id, num_tokens)

    def _emit_stored(self, request: CacheableRequest, group_id: int, start: int, end: int) -> None:
        chain, size = request.hash_chain, self.block_size
        self._events.emit(
            BlockStored(
                block_hashes=tuple(chain.hashes[start:end]),
                parent_hash=chain.hashes[start - 1] if start else None,
                token_ids=tuple(request.token_ids[start * size : end * size]),
                block_size=size,
                group_id=group_id,
                extra_keys=chain.extra_keys,
                owner=chain.owner,
            )
        )

    # Giving back

    def free(self, request_id: str, fence: int | None = None) -> None:
        """End a request's tables.

        Args:
            fence: the last step in flight that names the blocks; they are freed when it has been committed.
        """
        blocks = self.coordinator.pop(request_id)
        if fence is None:
            self.pool.release(blocks)
        elif blocks:
            self._fenced.append((fence, blocks))

    def release_fenced(self, committed_step: int) -> None:
        """Free what waited for steps up to ``committed_step``."""
        fenced = self._fenced
        if not fenced:
            return
        kept = [entry for entry in fenced if entry[0] > committed_step]
        for fence, blocks in fenced:
            if fence <= committed_step:
                self.pool.release(blocks)
        self._fenced = deque(kept)

    def lease(self, request_id: str) -> None:
        """End a request's tables but keep the blocks for a reader or writer until `end_lease`."""
        self._leased.setdefault(request_id, []).extend(self.coordinator.pop(request_id))

    def end_lease(self, request_id: str, fence: int | None = None) -> None:
        """Free leased blocks; unknown ids are ignored."""
        blocks = self._leased.pop(request_id, [])
        if fence is None:
            self.pool.release(blocks)
        elif blocks:
            self._fenced.append((fence, blocks))

    def invalidate(self, request_id: str, num_valid_blocks: int) -> bool:
        """Forget the contents of a table from block ``num_valid_blocks`` on; the slots stay.

        Returns:
            ``False`` when the request cannot go on from there, since blocks that it needs fell out of a window.
        """
        for group in self.coordinator.groups:
            for block in group.tables.get(request_id, [])[num_valid_blocks:]:
                self.pool.forget(block)
            group.truncate_stored(request_id, num_valid_blocks)
        return all(group.keeps_all(request_id, num_valid_blocks) for group in self.coordinator.groups)

    def first_block_among(self, request_id: str, block_ids: frozenset[int]) -> int | None:
        """Index of the first table entry that is one of ``block_ids``, over all groups."""
        found = [
            index
            for group in self.coordinator.groups
            for index, block in enumerate(group.tables.get(request_id, ()))
            if block.block_id in block_ids
        ]
        return min(found, default=None)

    def evict(self, block_ids: list[int]) -> None:
        """Make blocks unfindable without freeing them."""
        self.pool.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes; ``False``, changing nothing, while a request or a transfer holds blocks.

        Fenced blocks do not stand in the way: nobody will read or store them any more.
        """
        if self._leased or any(group.tables for group in self.coordinator.groups):
            return False
        self.pool.clear()
        return True

    def check_invariants(self) -> None:
        """Raise unless each block has exactly the owners that it counts."""
        null = self.pool.null_block
        owners: dict[int, int] = {}
        held = [table for group in self.coordinator.groups for table in group.tables.values()]
        held += [blocks for _, blocks in self._fenced]
        held += self._leased.values()
        for blocks in held:
            for block in blocks:
                if block is not null:
                    owners[block.block_id] = owners.get(block.block_id, 0) + 1
        self.pool.check_invariants(owners)
        first = self.coordinator.groups[0].tables
        for group in self.coordinator.groups:
            assert {k: len(v) for k, v in group.tables.items()} == {k: len(v) for k, v in first.items()}
