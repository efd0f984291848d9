"""The block tables of one KV group: what every kind of attention shares.

A table has one entry per block of the sequence from its start; entries that the kind no longer needs hold the null
block. Kinds differ in one function, `first_needed_block`; everything else follows from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.base.registry import Registry
from headrace.control.kv_cache.block import KVBlock
from headrace.control.kv_cache.block_pool import BlockPool
from headrace.messages.kv_cache import KVCacheSpec

GROUP_KINDS: Registry[type[GroupManager]] = Registry("KV cache kind")


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)


class GroupManager(ABC):
    """Tables of one group, by request id.

    Args:
        spec: of the group's layers.
        group_id: its place in the plan.
        pool: shared by all groups.
    """

    def __init__(self, spec: KVCacheSpec, group_id: int, pool: BlockPool) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.group_id = group_id
        self.pool = pool
        self.tables: dict[str, list[KVBlock]] = {}
        self._num_stored: dict[str, int] = {}
        self._first_kept: dict[str, int] = {}

    @staticmethod
    @abstractmethod
    def first_needed_block(spec: KVCacheSpec, num_computed_tokens: int) -> int:
        """Index of the first block that tokens from position ``num_computed_tokens`` on may read. Never falls."""

    @classmethod
    def max_blocks(cls, spec: KVCacheSpec, num_tokens: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` needs at once when it is computed a block at a time."""
        total = num_blocks_for(num_tokens, spec.block_size)
        if spec.window == 0:
            return total
        # The window's tokens may straddle a block border at either end, and one block is being filled.
        return min(total, num_blocks_for(spec.window, spec.block_size) + 2)

    @abstractmethod
    def longest_hit(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        """Most blocks, at most ``max_blocks``, after which a sequence may go on from findable blocks alone."""

    def hit_blocks(self, hashes: Sequence[bytes], num_blocks: int) -> list[KVBlock]:
        """The table of a hit of ``num_blocks`` that `longest_hit` allows."""
        first = self.first_needed_block(self.spec, num_blocks * self.block_size)
        findable = self.pool.findable(self.group_id)
        return [self.pool.null_block] * min(first, num_blocks) + [findable[h] for h in hashes[first:num_blocks]]

    def num_missing(self, request_id: str, num_hit_blocks: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Blocks to take so that ``num_tokens`` have slots, ``num_computed_tokens`` of them hit, loaded or computed."""
        held = max(num_hit_blocks, len(self.tables.get(request_id, ())))
        start = max(held, self.first_needed_block(self.spec, num_computed_tokens))
        return max(0, num_blocks_for(num_tokens, self.block_size) - start)

    def num_missing_whole(self, request_id: str, num_hit_blocks: int, num_tokens: int) -> int:
        """Blocks to take until the whole sequence of ``num_tokens`` is computed, a block at a time."""
        held = max(num_hit_blocks, len(self.tables.get(request_id, ())))
        missing = num_blocks_for(num_tokens, self.block_size) - held
        if self.spec.window:
            dropped = max(
                self._first_kept.get(request_id, 0),
                min(held, self.first_needed_block(self.spec, num_hit_blocks * self.block_size)),
            )
            missing = min(missing, self.max_blocks(self.spec, num_tokens) - (held - dropped))
        return max(0, missing)

    def adopt(self, request_id: str, blocks: list[KVBlock]) -> None:
        """Start a table with the blocks of a hit."""
        assert not self.tables.get(request_id), request_id
        self.pool.touch(blocks)
        self.tables[request_id] = blocks
        self._num_stored[request_id] = len(blocks)

    def append(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> list[int]:
        """Give ``num_tokens`` slots and return the ids of the entries added to the table."""
        table = self.tables.setdefault(request_id, [])
        before = len(table)
        total = num_blocks_for(num_tokens, self.block_size)
        skipped = min(self.first_needed_block(self.spec, num_computed_tokens), total) - before
        if skipped > 0:
            table.extend([self.pool.null_block] * skipped)
        if total > len(table):
            table.extend(self.pool.take(total - len(table)))
        return [block.block_id for block in table[before:]]

    def store(self, request_id: str, hashes: Sequence[bytes], num_blocks: int) -> tuple[int, int] | None:
        """Make the first ``num_blocks`` findable; returns the range of blocks that newly became so."""
        start = self._num_stored.get(request_id, 0)
        if start >= num_blocks:
            return None
        table = self.tables[request_id]
        self._num_stored[request_id] = num_blocks
        first: int | None = None
        end = start
        for index in range(start, num_blocks):
            block = table[index]
            if block is self.pool.null_block or not self.pool.store(block, hashes[index], self.group_id):
                continue
            first = index if first is None else first
            end = index + 1
        return None if first is None else (first, end)

    def drop_outside(self, request_id: str, num_committed_tokens: int) -> None:
        """Free blocks that no token from ``num_committed_tokens`` on can read; steps in flight read none of them."""
        first = self.first_needed_block(self.spec, num_committed_tokens)
        start = self._first_kept.get(request_id, 0)
        table = self.tables[request_id]
        first = min(first, len(table))
        if first <= start:
            return
        self._first_kept[request_id] = first
        null = self.pool.null_block
        self.pool.release(block for block in reversed(table[start:first]) if block is not null)
        table[start:first] = [null] * (first - start)

    def pop(self, request_id: str) -> list[KVBlock]:
        """End a table and hand its blocks, tail first, to the caller, who now owns them."""
        self._num_stored.pop(request_id, None)
        self._first_kept.pop(request_id, None)
        return list(reversed(self.tables.pop(request_id, [])))

    def truncate_stored(self, request_id: str, num_blocks: int) -> None:
        """Blocks from ``num_blocks`` on will be computed and stored again."""
        if self._num_stored.get(request_id, 0) > num_blocks:
            self._num_stored[request_id] = num_blocks

    def keeps_all(self, request_id: str, num_blocks: int) -> bool:
        """Whether a sequence may go on after its first ``num_blocks`` blocks: none that it reads or writes is gone."""
        first = self.first_needed_block(self.spec, num_blocks * self.block_size)
        null = self.pool.null_block
        return all(block is not null for block in self.tables.get(request_id, [])[first:])
