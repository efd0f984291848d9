"""Chunked local attention: a token sees its own chunk of ``window`` positions from the chunk's start."""

from __future__ import annotations

from headrace.control.kv_cache.group import GROUP_KINDS
from headrace.control.kv_cache.windowed import WindowedGroupManager
from headrace.messages.kv_cache import KVCacheKind, KVCacheSpec


@GROUP_KINDS.register(KVCacheKind.CHUNKED_LOCAL.value)
class ChunkedLocalGroupManager(WindowedGroupManager):
    """Tables of layers with local chunks."""

    @staticmethod
    def first_needed_block(spec: KVCacheSpec, num_computed_tokens: int) -> int:
        return num_computed_tokens // spec.window * spec.window // spec.block_size
