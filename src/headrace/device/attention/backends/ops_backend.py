"""A backend whose two halves are operators over the CPU layout; subclasses say when they can serve."""

from __future__ import annotations

import torch

from headrace.device.attention.backend import LayerFacts
from headrace.device.attention.cpu_layout import allocate_cpu_blocks, make_cpu_spec
from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.ops.interface import AttentionShape, Ops
from headrace.messages.kv_cache import KVCacheSpec


class OpsBackend:
    """Rotation, storing and attention through `Ops`."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def make_spec(self, facts: LayerFacts, block_size: int, kv_dtype: str) -> KVCacheSpec:
        return make_cpu_spec(facts, block_size, kv_dtype)

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> LayerCache:
        return allocate_cpu_blocks(spec, num_blocks)

    def run(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        shape: AttentionShape,
        meta: AttentionMetadata,
        cache: LayerCache,
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        q = self._ops.rotate_and_store(qkv, positions, cos_sin, shape, meta, cache, qk_norm)
        return self._ops.attention(q, shape, meta, cache)
