"""How KV blocks look and how many there are: the only description that connectors, offload and copies may use."""

from __future__ import annotations

from enum import Enum
from math import prod

import msgspec


class KVCacheKind(str, Enum):
    """What a group's layers keep of the past."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MAMBA = "mamba"


class KVTensorLayout(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache: ``[num_blocks, *block_shape]`` with the given names of the inner dimensions.

    ``strides`` counts elements, one per dimension of ``[block, *block_shape]``.
    """

    name: str
    dims: tuple[str, ...]
    block_shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @property
    def block_elements(self) -> int:
        """Elements of one block."""
        return prod(self.block_shape)


class KVCacheSpec(msgspec.Struct, frozen=True):
    """The cache of one layer, with the layout that its attention backend chose.

    ``window`` is the sliding window or the local chunk in tokens, 0 for full attention. ``page_bytes`` is the size of
    one block of one layer, keys and values together.
    """

    kind: KVCacheKind
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    tensors: tuple[KVTensorLayout, ...]
    page_bytes: int
    window: int = 0


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table."""

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The plan that scheduler and runner share. ``num_blocks`` counts the null block 0."""

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
