"""One layer's attention: projections, the backend's call, and the facts that the backend needs."""

from __future__ import annotations

import torch

from headrace.config.architecture import Architecture
from headrace.device.attention.backend import AttentionBackend, LayerFacts
from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import Group
from headrace.device.layers.linear import QKVLinear, RowParallelLinear
from headrace.device.loading.weights import WeightReader
from headrace.device.ops.interface import Ops


class Attention:
    """Grouped-query attention with rotary positions; satisfies `AttentionShape` with this rank's heads."""

    def __init__(self, arch: Architecture, layer: int, ops: Ops, backend: AttentionBackend, group: Group) -> None:
        prefix = f"layers.{layer}"
        kind = arch.layer_kinds[layer]
        self._layer = layer
        self._backend = backend
        self._arch = arch
        self._prefix = prefix
        self.qkv = QKVLinear(
            ops, prefix, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.qkv_bias, group
        )
        self.output = RowParallelLinear(
            ops, f"{prefix}.o", arch.num_heads * arch.head_dim, arch.hidden_size, arch.output_bias, group
        )
        self.num_heads = arch.num_heads // group.size
        self.num_kv_heads = arch.num_kv_heads // group.size
        self.head_dim = arch.head_dim
        self.scale = arch.query_scale if arch.query_scale is not None else arch.head_dim**-0.5
        self.window = arch.window if kind == "sliding_window" else 0
        self.chunk = arch.window if kind == "chunked_local" else 0
        self.softcap = arch.attn_softcap
        self.sinks: torch.Tensor | None = None
        self._qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @property
    def facts(self) -> LayerFacts:
        """What the layer's cache must hold."""
        return LayerFacts(self.num_kv_heads, self.head_dim, self.window, self.chunk)

    def load(self, weights: WeightReader) -> None:
        """Take the weights."""
        self.qkv.load(weights)
        self.output.load(weights)
        arch = self._arch
        if arch.qk_norm != "none":
            heads, kv_heads = (1, 1) if arch.qk_norm == "head" else (arch.num_heads, arch.num_kv_heads)
            q_norm = weights.norm(f"{self._prefix}.q_norm", heads * self.head_dim)
            k_norm = weights.norm(f"{self._prefix}.k_norm", kv_heads * self.head_dim)
            self._qk_norm = (q_norm, k_norm, arch.norm_eps)

    def forward(self, x: torch.Tensor, ctx: ForwardContext, cos_sin: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``; writes the tokens' keys and values."""
        meta, cache = ctx.for_layer(self._layer)
        qkv = self.qkv.forward(x)
        attended = self._backend.run(qkv, ctx.positions, cos_sin, self, meta, cache, self._qk_norm)
        return self.output.forward(attended)
