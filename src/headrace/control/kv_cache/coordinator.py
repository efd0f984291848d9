"""All groups as one: the longest hit that every group can honour, and tables that grow together.

A request's tables have the same length in every group, so that one number says how many slots it has.
"""

from __future__ import annotations

from collections.abc import Sequence

# The kinds file themselves in the registry when they are imported.
from headrace.control.kv_cache import chunked_local, full, sliding_window  # noqa: F401
from headrace.control.kv_cache.block import KVBlock
from headrace.control.kv_cache.block_pool import BlockPool
from headrace.control.kv_cache.group import GROUP_KINDS, num_blocks_for
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.scheduler_output import BlockIds


class Coordinator:
    """The managers of all groups.

    Args:
        config: the plan; every group's blocks hold the same number of tokens.
        pool: blocks of all groups.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool) -> None:
        assert all(group.spec.block_size == config.block_size for group in config.groups)
        self.block_size = config.block_size
        self.pool = pool
        self.groups = [
            GROUP_KINDS.get(group.spec.kind.value)(group.spec, group_id, pool)
            for group_id, group in enumerate(config.groups)
        ]
        self.windowed = any(group.spec.window for group in config.groups)

    def find_longest_hit(self, hashes: Sequence[bytes], max_blocks: int) -> tuple[int, tuple[list[KVBlock], ...]]:
        """Number of blocks that every group can give, and their tables.

        A group may shorten what another one allowed, and only full attention allows every shorter hit too, so groups
        are asked again until none objects. Each round shortens the hit: the loop ends.
        """
        max_blocks = min(max_blocks, len(hashes))
        if len(self.groups) == 1:
            num_blocks = self.groups[0].longest_hit(hashes, max_blocks)
        else:
            num_blocks, settled = max_blocks, False
            while not settled:
                before = num_blocks
                for group in self.groups:
                    num_blocks = group.longest_hit(hashes, num_blocks)
                settled = num_blocks == before
        return num_blocks, tuple(group.hit_blocks(hashes, num_blocks) for group in self.groups)

    def num_missing(self, request_id: str, num_hit_blocks: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Blocks to take, over all groups, so that ``num_tokens`` have slots."""
        return sum(
            group.num_missing(request_id, num_hit_blocks, num_computed_tokens, num_tokens) for group in self.groups
        )

    def num_missing_whole(self, request_id: str, num_hit_blocks: int, num_tokens: int) -> int:
        """Blocks to take, over all groups, until all ``num_tokens`` are computed."""
        return sum(group.num_missing_whole(request_id, num_hit_blocks, num_tokens) for group in self.groups)

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of ``num_tokens`` holds at once."""
        return sum(type(group).max_blocks(group.spec, num_tokens) for group in self.groups)

    def adopt(self, request_id: str, blocks: tuple[list[KVBlock], ...]) -> None:
        """Start tables with a hit."""
        for group, hit in zip(self.groups, blocks, strict=True):
            group.adopt(request_id, hit)

    def append(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> BlockIds:
        """Give ``num_tokens`` slots; returns the added ids per group."""
        return tuple(group.append(request_id, num_computed_tokens, num_tokens) for group in self.groups)

    def pop(self, request_id: str) -> list[KVBlock]:
        """End all tables and return their blocks tail first."""
        return [block for group in self.groups for block in group.pop(request_id)]

    def get_block_ids(self, request_id: str) -> BlockIds:
        """Tables as ids; empty for a request without one."""
        return tuple([block.block_id for block in group.tables.get(request_id, ())] for group in self.groups)

    def num_slots(self, request_id: str) -> int:
        """Tokens for which the tables have room."""
        return len(self.groups[0].tables.get(request_id, ())) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Table entries of ``num_tokens`` in one group."""
        return num_blocks_for(num_tokens, self.block_size)
