"""Sliding-window attention: a token sees itself and the ``window - 1`` tokens before it."""

from __future__ import annotations

from headrace.control.kv_cache.group import GROUP_KINDS
from headrace.control.kv_cache.windowed import WindowedGroupManager
from headrace.messages.kv_cache import KVCacheKind, KVCacheSpec


@GROUP_KINDS.register(KVCacheKind.SLIDING_WINDOW.value)
class SlidingWindowGroupManager(WindowedGroupManager):
    """Tables of layers with a sliding window."""

    @staticmethod
    def first_needed_block(spec: KVCacheSpec, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - spec.window + 1) // spec.block_size
