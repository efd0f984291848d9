"""The operators in plain PyTorch: always there, and the oracle of every faster implementation.

Weights are dequantised to one float type and used as they are. Norms, rotation, attention and logits are computed in
float32 whatever the activation type is. Rows are equal across batches up to the rounding of PyTorch's products, not bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.ops.interface import (
    Activation,
    AttentionShape,
    PackedStore,
    StepInputs,
    StepMemory,
    Weight,
    WeightRole,
)
from headrace.device.ops.reference.attention import paged_attention, store_kv
from headrace.device.ops.reference.step_inputs import NumpyStepInputs
from headrace.device.quantization.raw_tensor import RawTensor
from headrace.device.sampling.kernels import NumpySampling


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A dequantised matrix ``[out_features, in_features]``."""

    matrix: torch.Tensor
    format: str

    @property
    def out_features(self) -> int:
        return self.matrix.shape[0]

    @property
    def in_features(self) -> int:
        return self.matrix.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes


def _matrix(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, ReferenceWeight), type(weight)
    return weight.matrix


def _activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(x.dtype)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Turn the first ``rotary_dim`` values of each head: ``[T, heads, head_dim]`` by ``[T, rotary_dim]``."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None, : rotary_dim // 2], cos_sin[:, None, rotary_dim // 2 :]
    wide = x.to(torch.float32)
    first, second, rest = wide.tensor_split((rotary_dim // 2, rotary_dim), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


class ReferenceOps:
    """`Ops` in PyTorch.

    Args:
        dtype: type of weights and activations.
    """

    name = "reference"
    sampling = NumpySampling()

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def set_packed_store(self, store: PackedStore | None) -> None:
        pass

    def pack_weight(self, parts: Sequence[RawTensor], role: WeightRole) -> ReferenceWeight:
        """Dequantise and join by rows."""
        assert role != "gate_up" or (len(parts) == 2 and parts[0].shape == parts[1].shape)
        assert len({part.shape[1] for part in parts}) == 1
        matrix = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=self.dtype)
        row = 0
        for part in parts:
            matrix[row : row + part.shape[0]] = torch.from_numpy(part.dequantize())
            row += part.shape[0]
        return ReferenceWeight(matrix, str(self.dtype).removeprefix("torch."))

    def embedding(self, ids: torch.Tensor, table: Weight, scale: float = 1.0) -> torch.Tensor:
        rows = functional.embedding(ids, _matrix(table))
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual.add_(x)
        return _rms_norm(residual, weight, eps), residual

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, _matrix(weight), bias if bias is None else bias.to(x.dtype))

    def gated_linear(self, x: torch.Tensor, gate_up: Weight, activation: Activation) -> torch.Tensor:
        gate, up = functional.linear(x, _matrix(gate_up)).chunk(2, dim=-1)
        return _activate(gate, activation) * up

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        shape: AttentionShape,
        meta: AttentionMetadata,
        cache: LayerCache,
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        tokens = len(qkv)
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
        if qk_norm is not None:
            q_weight, k_weight, eps = qk_norm
            q = _rms_norm(q.reshape(tokens, -1, len(q_weight)), q_weight, eps)
            k = _rms_norm(k.reshape(tokens, -1, len(k_weight)), k_weight, eps)
        angles = cos_sin[positions[:tokens]]
        q = _rotate(q.reshape(tokens, shape.num_heads, shape.head_dim), angles)
        k = _rotate(k.reshape(tokens, shape.num_kv_heads, shape.head_dim), angles)
        v = v.reshape(tokens, shape.num_kv_heads, shape.head_dim)
        store_kv(k, v, meta.slot_mapping[:tokens], cache)
        return q.reshape(tokens, q_size)

    def attention(
        self, q: torch.Tensor, shape: AttentionShape, meta: AttentionMetadata, cache: LayerCache
    ) -> torch.Tensor:
        return paged_attention(q, shape, meta, cache)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    def logits(self, x: torch.Tensor, head: Weight, softcap: float = 0.0) -> torch.Tensor:
        logits = functional.linear(x, _matrix(head)).to(torch.float32)
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    def moe(
        self,
        x: torch.Tensor,
        router: Weight,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        top_k: int,
        activation: Activation,
        renormalize: bool,
    ) -> torch.Tensor:
        probs = torch.softmax(functional.linear(x, _matrix(router)).to(torch.float32), dim=-1)
        weights, experts = probs.topk(top_k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        parts = torch.zeros(len(x), top_k, x.shape[1], dtype=x.dtype)
        for expert in experts.unique().tolist():
            rows, places = (experts == expert).nonzero(as_tuple=True)
            hidden = self.gated_linear(x[rows], gate_up[expert], activation)
            share = weights[rows, places, None].to(x.dtype)
            parts[rows, places] = functional.linear(hidden, _matrix(down[expert])) * share
        out = parts[:, 0]
        for place in range(1, top_k):
            out = out + parts[:, place]
        return out.contiguous()

    def make_step_inputs(self, memory: StepMemory) -> StepInputs:
        return NumpyStepInputs(memory)
