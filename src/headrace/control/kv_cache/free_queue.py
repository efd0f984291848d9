"""The free queue: an intrusive doubly linked list of blocks without an owner.

The front is reused first. A block that is hit again leaves from the middle in O(1), which no deque can do; that is why
the links live in the blocks. Sentinels at both ends keep every operation free of special cases.

Invariant: a block is linked exactly when its ``ref_count`` is 0 (and it is not the null block).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.control.kv_cache.block import KVBlock


class FreeQueue:
    """Blocks in the order in which they will be reused."""

    def __init__(self, blocks: Iterable[KVBlock] = ()) -> None:
        self._front = KVBlock(-1)
        self._back = KVBlock(-2)
        self._front.next_free = self._back
        self._back.prev_free = self._front
        self._length = 0
        self.append_all(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._front.next_free
        while block is not self._back:
            assert block is not None
            yield block
            block = block.next_free

    def pop_front(self, count: int) -> list[KVBlock]:
        """Unlink and return the first ``count`` blocks; there must be that many."""
        assert count <= self._length, (count, self._length)
        popped: list[KVBlock] = []
        block = self._front.next_free
        for _ in range(count):
            assert block is not None
            popped.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._front.next_free = block
        block.prev_free = self._front
        self._length -= count
        return popped

    def remove(self, block: KVBlock) -> None:
        """Unlink a block from wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, block
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._length -= 1

    def append_all(self, blocks: Iterable[KVBlock]) -> None:
        """Link blocks at the back, the last of them hindmost."""
        last = self._back.prev_free
        assert last is not None
        for block in blocks:
            assert block.next_free is None, block
            last.next_free = block
            block.prev_free = last
            # A link to the end from the start: a block given twice trips the assertion above.
            block.next_free = self._back
            last = block
            self._length += 1
        self._back.prev_free = last

    def prepend_all(self, blocks: Iterable[KVBlock]) -> None:
        """Link blocks at the front, the last of them foremost."""
        first = self._front.next_free
        assert first is not None
        for block in blocks:
            assert block.next_free is None, block
            block.next_free = first
            first.prev_free = block
            block.prev_free = self._front
            first = block
            self._length += 1
        self._front.next_free = first
