"""The memory of KV blocks: allocation by the plan that scheduler and runner share, and work on whole blocks.

Every layer has storage for every block id. A block id belongs to one group at a time, so work on an id in the layers of
other groups touches nothing that anybody reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.device.attention.backend import AttentionBackend
from headrace.device.attention.metadata import LayerCache
from headrace.messages.kv_cache import KVCacheConfig


class KVMemory:
    """Blocks of all layers of this worker.

    Attributes:
        caches: blocks per layer.
        layer_groups: group index per layer.
    """

    def __init__(self, config: KVCacheConfig, backend: AttentionBackend) -> None:
        group_of = {layer: index for index, group in enumerate(config.groups) for layer in group.layer_indices}
        assert sorted(group_of) == list(range(len(group_of))), "the plan must name every layer once"
        self.layer_groups = [group_of[layer] for layer in range(len(group_of))]
        self.caches: list[LayerCache] = [
            backend.allocate(config.groups[index].spec, config.num_blocks) for index in self.layer_groups
        ]
        self._tensors = [t for cache in self.caches for t in cache if t is not None]

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return sum(t.numel() * t.element_size() for t in self._tensors)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with zeros in every layer."""
        if block_ids:
            index = torch.tensor(block_ids, dtype=torch.int64)
            for tensor in self._tensors:
                tensor.index_fill_(0, index.to(tensor.device), 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks ``(source, destination)`` in every layer; all sources are read before any is written."""
        if pairs:
            source, destination = torch.tensor(pairs, dtype=torch.int64).unbind(1)
            for tensor in self._tensors:
                tensor[destination.to(tensor.device)] = tensor[source.to(tensor.device)]
