"""What the kinds with a bounded view of the past share: a hit needs only the blocks inside the view."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.control.kv_cache.group import GroupManager


class WindowedGroupManager(GroupManager):
    """Tables whose blocks fall out of view."""

    def longest_hit(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        """Walks from the right: a miss at block ``i`` makes ``i`` the next candidate, whose view begins no later."""
        findable = self.pool.findable(self.group_id)
        length = max_blocks
        needed = self.first_needed_block(self.spec, length * self.block_size)
        index = length - 1
        while index >= needed and length > 0:
            if hashes[index] not in findable:
                length = index
                needed = self.first_needed_block(self.spec, length * self.block_size)
            index -= 1
        return length
