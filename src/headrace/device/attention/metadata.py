"""What a forward needs beside token ids, passed explicitly: no layer reads a global."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headrace.base.progress import ProgressWord


class LayerCache(NamedTuple):
    """Views of one layer's KV blocks, in the layout that the attention backend's `KVCacheSpec` names.

    On CPU: ``key`` is ``[block, kv_head, head_dim, token]``, ``value`` is ``[block, kv_head, token, head_dim]``.
    ``scales`` exists for int8 blocks only: float32 ``[block, kv_head, side, token]``, keys first; a value is its
    integer times the scale of its token and head.
    """

    key: torch.Tensor
    value: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(slots=True)
class AttentionMetadata:
    """One KV group's view of a step of ``R`` requests and ``T`` tokens; buffers are persistent and may be longer.

    Attributes:
        query_start_loc: int32 ``[R + 1]``; tokens of request ``i`` are ``query_start_loc[i]:query_start_loc[i + 1]``.
        seq_lens: int32 ``[R]``; tokens of request ``i`` after this step (computed before plus now).
        block_table: int32 ``[R, max_blocks]``.
        slot_mapping: int64 ``[T]``; ``block_id * block_size + offset``, -1 for padding.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(slots=True)
class ForwardContext:
    """One step's inputs to the layers.

    Attributes:
        positions: int32 ``[T]``, absolute positions.
        groups: metadata per KV group.
        layer_groups: group index per layer.
        caches: blocks per layer.
        progress: advanced by every eager layer and native op.
    """

    positions: torch.Tensor
    groups: list[AttentionMetadata]
    layer_groups: list[int]
    caches: list[LayerCache]
    progress: ProgressWord = field(default_factory=ProgressWord)

    def for_layer(self, layer: int) -> tuple[AttentionMetadata, LayerCache]:
        """Metadata and cache of one layer."""
        return self.groups[self.layer_groups[layer]], self.caches[layer]
