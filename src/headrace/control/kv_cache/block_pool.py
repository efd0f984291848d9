"""All KV blocks of the engine: which are free, which are findable by content, who counts as an owner.

Owns the blocks, the free queue and the map from hash to block. Knows nothing of requests. Rules:

- Block 0 is the null block: it stands for blocks outside a window, is never free, never owned, never written.
- Freed blocks without a hash go to the front of the free queue (nothing is lost by reusing them), hashed ones to the
  back, so that the queue is in the order of least recent use.
- A hash is evicted only when its block is reused. One block per (group, hash) is findable; a second block with the same
  contents stays unhashed, so that block ids in a table never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.control.kv_cache.block import NULL_BLOCK_ID, KVBlock
from headrace.control.kv_cache.events import AllBlocksCleared, BlockRemoved, EventSink
from headrace.control.kv_cache.free_queue import FreeQueue


class BlockPool:
    """The blocks.

    Args:
        num_blocks: of the plan, the null block included.
        num_groups: KV groups; each has its own key space.
        events: told when findable blocks are removed.
    """

    def __init__(self, num_blocks: int, num_groups: int, events: EventSink) -> None:
        assert num_blocks >= 2, num_blocks
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.free_queue = FreeQueue(self.blocks[1:])
        self._findable: list[dict[bytes, KVBlock]] = [{} for _ in range(num_groups)]
        self._events = events
        self.num_taken = 0
        self.num_freed = 0
        self.num_evicted = 0
        self.num_stored = 0

    @property
    def num_usable(self) -> int:
        """Blocks that can be owned."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that have an owner."""
        return 1.0 - self.num_free / self.num_usable

    @property
    def num_findable(self) -> int:
        """Blocks that a prefix hit can give."""
        return sum(len(findable) for findable in self._findable)

    def findable(self, group_id: int) -> dict[bytes, KVBlock]:
        """Hash to block of one group, to look up in; never mutate it."""
        return self._findable[group_id]

    def take(self, count: int) -> list[KVBlock]:
        """Own ``count`` free blocks; their hashes are evicted."""
        blocks = self.free_queue.pop_front(count)
        for block in blocks:
            if block.block_hash is not None:
                self.num_evicted += 1
                self.forget(block)
            assert block.ref_count == 0, block
            block.ref_count = 1
        self.num_taken += count
        return blocks

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Add an owner to each block (the null block has none)."""
        remove = self.free_queue.remove
        for block in blocks:
            if block.ref_count == 0:
                if block.block_id == NULL_BLOCK_ID:
                    continue
                remove(block)
            block.ref_count += 1

    def release(self, blocks: Iterable[KVBlock]) -> None:
        """Take an owner from each block; give a request's blocks tail first."""
        plain: list[KVBlock] = []
        hashed: list[KVBlock] = []
        for block in blocks:
            if block.block_id == NULL_BLOCK_ID:
                continue
            assert block.ref_count > 0, block
            block.ref_count -= 1
            if block.ref_count == 0:
                (plain if block.block_hash is None else hashed).append(block)
        self.free_queue.prepend_all(plain)
        self.free_queue.append_all(hashed)
        self.num_freed += len(plain) + len(hashed)

    def store(self, block: KVBlock, block_hash: bytes, group_id: int) -> bool:
        """Make an owned block findable; ``False`` when another block already is under this key."""
        findable = self._findable[group_id]
        if block_hash in findable or block.block_hash is not None:
            return False
        assert block.ref_count > 0, block
        findable[block_hash] = block
        block.block_hash = block_hash
        block.group_id = group_id
        self.num_stored += 1
        return True

    def forget(self, block: KVBlock) -> None:
        """Make a block unfindable; its owners keep it."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        del self._findable[block.group_id][block_hash]
        block.block_hash = None
        self._events.emit(BlockRemoved(block_hash, block.group_id))

    def evict(self, block_ids: Sequence[int]) -> None:
        """Make the named blocks unfindable."""
        for block_id in block_ids:
            self.forget(self.blocks[block_id])

    def clear(self) -> None:
        """Make every block unfindable."""
        for findable in self._findable:
            for block in findable.values():
                block.block_hash = None
            findable.clear()
        self._events.emit(AllBlocksCleared())

    def check_invariants(self, owners: dict[int, int]) -> None:
        """Raise unless the blocks agree with ``owners``, the number of owners by block id as the caller counts them."""
        free_ids = [block.block_id for block in self.free_queue]
        free = set(free_ids)
        assert len(free_ids) == len(free) == len(self.free_queue), "the free queue holds a block twice"
        assert NULL_BLOCK_ID not in free and self.null_block.ref_count == 0 and self.null_block.block_hash is None
        for block in self.blocks[1:]:
            expected = owners.get(block.block_id, 0)
            assert block.ref_count == expected, f"{block} has {expected} owners"
            assert (block.ref_count == 0) == (block.block_id in free), f"{block} is lost or free while owned"
            if block.block_hash is not None:
                assert self._findable[block.group_id].get(block.block_hash) is block, f"{block} is not findable"
        assert self.num_findable == sum(block.block_hash is not None for block in self.blocks)
