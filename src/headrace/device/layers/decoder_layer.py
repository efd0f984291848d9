"""Attention and MLP with norms around them, in the three placements that families use.

Between layers the residual stream is kept apart from the last half's output, so that the sum and the next norm are one
operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from headrace.config.architecture import Architecture
from headrace.device.attention.backend import AttentionBackend
from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import ParallelGroups
from headrace.device.layers.attention import Attention
from headrace.device.layers.mlp import GatedMLP
from headrace.device.layers.norm import RMSNorm
from headrace.device.loading.weights import WeightReader
from headrace.device.ops.interface import Ops

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""The last sub-layer's output and the residual that it must still be added to, if any."""


class DecoderLayer(ABC):
    """One layer; a subclass names its norm slots and says where they stand."""

    norms: Sequence[str] = ()

    def __init__(
        self, arch: Architecture, layer: int, ops: Ops, backend: AttentionBackend, parallel: ParallelGroups
    ) -> None:
        prefix = f"layers.{layer}"
        self._ops = ops
        self.attention = Attention(arch, layer, ops, backend, parallel.tp)
        self.mlp = GatedMLP(ops, prefix, arch.hidden_size, arch.intermediate_size, arch.activation, parallel.tp)
        self.norm = {n: RMSNorm(ops, f"{prefix}.{n}", arch.hidden_size, arch.norm_eps) for n in self.norms}

    def load(self, weights: WeightReader) -> None:
        """Take the layer's weights."""
        self.attention.load(weights)
        self.mlp.load(weights)
        for norm in self.norm.values():
            norm.load(weights)

    @abstractmethod
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        """Run the layer on ``[T, H]``; both inputs may be overwritten."""

    def _enter(self, x: torch.Tensor, residual: torch.Tensor | None, norm: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what is outstanding and normalise."""
        if residual is None:
            return self.norm[norm].forward(x), x
        return self.norm[norm].add_forward(x, residual)


class PreNormLayer(DecoderLayer):
    """A norm before each half."""

    norms = ("input_norm", "mlp_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        x, residual = self._enter(x, residual, "input_norm")
        x = self.attention.forward(x, ctx, cos_sin)
        x, residual = self.norm["mlp_norm"].add_forward(x, residual)
        return self.mlp.forward(x), residual


class SandwichNormLayer(DecoderLayer):
    """A norm before and after each half."""

    norms = ("input_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        x, residual = self._enter(x, residual, "input_norm")
        x = self.norm["post_attn_norm"].forward(self.attention.forward(x, ctx, cos_sin))
        x, residual = self.norm["mlp_norm"].add_forward(x, residual)
        return self.norm["post_mlp_norm"].forward(self.mlp.forward(x)), residual


class PostNormLayer(DecoderLayer):
    """A norm after each half, before it is added."""

    norms = ("post_attn_norm", "post_mlp_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        assert residual is None
        x = self._ops.add(x, self.norm["post_attn_norm"].forward(self.attention.forward(x, ctx, cos_sin)))
        return self._ops.add(x, self.norm["post_mlp_norm"].forward(self.mlp.forward(x))), None
