"""Token embedding and head. Tied ones are one packed matrix.

Every tensor-parallel rank holds them whole and computes all logits: all ranks sample the same tokens without a word to
each other, at the price of the memory of one matrix a rank.
"""

from __future__ import annotations

from typing import Literal

import torch

from headrace.device.loading.weights import WeightReader
from headrace.device.ops.interface import Ops, Weight


class Vocabulary:
    """The model's two ends: ids to hidden states, hidden states to logits.

    Args:
        tied: whether both share one matrix.
        has_embedding: whether this pipeline stage embeds (the first one).
        has_head: whether this pipeline stage makes logits (the last one).
    """

    table: Weight
    head: Weight

    def __init__(
        self,
        ops: Ops,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        scale: float,
        softcap: float,
        has_embedding: bool,
        has_head: bool,
    ) -> None:
        self._ops = ops
        self._shape = (vocab_size, hidden_size)
        self._tied = tied
        self._scale = scale
        self._softcap = softcap
        self._has_embedding = has_embedding
        self._has_head = has_head

    def load(self, weights: WeightReader) -> None:
        """Take and pack what this stage needs."""
        if self._tied:
            if self._has_embedding or self._has_head:
                self.table = self.head = self._pack(weights, "embedding", "head" if self._has_head else "embedding")
            return
        if self._has_embedding:
            self.table = self._pack(weights, "embedding", "embedding")
        if self._has_head:
            self.head = self._pack(weights, "head", "head")

    def _pack(self, weights: WeightReader, slot: str, role: Literal["embedding", "head"]) -> Weight:
        raw = weights.matrix(slot, *self._shape)
        weight = self._ops.pack_weight([raw], role)
        weights.done(raw)
        return weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T] -> [T, H]``."""
        return self._ops.embedding(ids, self.table, self._scale)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, H] -> [R, V]`` float32."""
        return self._ops.logits(rows, self.head, self._softcap)
