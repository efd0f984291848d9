"""What an attention backend is: it judges a need, chooses the layout of KV blocks, and runs one layer's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.ops.interface import AttentionShape
from headrace.messages.kv_cache import KVCacheSpec


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Everything that the choice of a backend depends on.

    ``ops`` is the name of the operator implementation in use. ``dtype`` is the activation type; ``window``, ``chunk``,
    ``softcap``, ``sinks`` and ``mla`` say whether any layer has them.
    """

    platform: str
    ops: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    kv_dtype: str
    block_size: int
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sinks: bool = False
    mla: bool = False


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer keeps of the past; sizes are this rank's share."""

    num_kv_heads: int
    head_dim: int
    window: int = 0
    chunk: int = 0


class AttentionBackend(Protocol):
    """One way to do paged attention."""

    name: str

    def refuse(self, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve ``needs``; ``None`` when it can. Pure and free of imports of its packages."""
        ...

    def make_spec(self, facts: LayerFacts, block_size: int, kv_dtype: str) -> KVCacheSpec:
        """The cache of a layer, in the layout that the kernels read."""
        ...

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> LayerCache:
        """Zeroed blocks of one layer."""
        ...

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
        """Norm and rotate q and k, store k and v, attend: ``[T, heads * head_dim]``. ``qkv`` is overwritten."""
        ...
