"""Full attention: every block of the past is needed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.control.kv_cache.group import GROUP_KINDS, GroupManager
from headrace.messages.kv_cache import KVCacheKind, KVCacheSpec


@GROUP_KINDS.register(KVCacheKind.FULL.value)
class FullGroupManager(GroupManager):
    """Tables of layers that see everything."""

    @staticmethod
    def first_needed_block(spec: KVCacheSpec, num_computed_tokens: int) -> int:
        return 0

    def longest_hit(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        findable = self.pool.findable(self.group_id)
        for index in range(max_blocks):
            if hashes[index] not in findable:
                return index
        return max_blocks
