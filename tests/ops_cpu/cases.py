"""Random inputs for operator tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.quantization.formats import FORMATS
from headrace.device.quantization.raw_tensor import RawTensor, make_raw_float

FLOAT_FORMATS = ("F32", "F16", "BF16")
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
QUANTIZED_FORMATS = BLOCK_FORMATS + K_FORMATS
# Where a block keeps its float16 scales.
_HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def whole_blocks(format_name: str, cols: int) -> int:
    """The least width from ``cols`` on that the format can have."""
    block = FORMATS[format_name].block
    return -(-cols // block) * block


def make_raw(format_name: str, rows: int, cols: int, rng: np.random.Generator) -> RawTensor:
    """A random tensor as it would lie in a file; quantised ones use all bit patterns and small scales."""
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    form = FORMATS[format_name]
    if format_name == "F32":
        return make_raw_float("w", values)
    if format_name == "F16":
        return RawTensor("w", (rows, cols), form, values.astype(np.float16).view(np.uint8))
    if format_name == "BF16":
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        return RawTensor("w", (rows, cols), form, halves.view(np.uint8))
    blocks = rng.integers(0, 256, (rows, cols // form.block, form.block_bytes)).astype(np.uint8)
    for at in _HALVES.get(format_name, (0,)):
        halves = (rng.standard_normal((rows, cols // form.block, 1)) * 0.05).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    return RawTensor("w", (rows, cols), form, blocks.reshape(rows, -1))


def make_rows(rows: int, cols: int, rng: np.random.Generator) -> torch.Tensor:
    """Random activations."""
    return torch.from_numpy(rng.standard_normal((rows, cols)).astype(np.float32))


@dataclass
class Shape:
    """One attention layer's facts."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass
class AttentionCase:
    """Everything that `rotate_and_store` and `attention` take, for requests given as (new tokens, tokens in all)."""

    shape: Shape
    meta: AttentionMetadata
    cache: LayerCache
    qkv: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None

    def fresh_cache(self) -> LayerCache:
        """A copy of the blocks before the step."""
        return LayerCache(*(None if t is None else t.clone() for t in self.cache))


def make_attention(
    reqs: tuple[tuple[int, int], ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    qk_norm: str = "none",
) -> AttentionCase:
    """A step over scattered blocks whose unused slots hold other numbers."""
    rng = torch.Generator().manual_seed(seed)
    max_blocks = max(total for _, total in reqs) // block_size + 2
    num_blocks = 1 + len(reqs) * max_blocks
    table = (torch.randperm(num_blocks - 1, generator=rng) + 1).int().reshape(len(reqs), max_blocks).contiguous()
    positions = torch.cat([torch.arange(total - new, total) for new, total in reqs]).int()
    owner = torch.cat([torch.full((new,), i) for i, (new, _) in enumerate(reqs)])
    slots = table[owner, positions // block_size].long() * block_size + positions % block_size
    starts = np.concatenate([[0], np.cumsum([new for new, _ in reqs])]).astype(np.int32)
    meta = AttentionMetadata(
        num_tokens=len(positions),
        num_reqs=len(reqs),
        max_query_len=max(new for new, _ in reqs),
        max_seq_len=max(total for _, total in reqs),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.tensor([total for _, total in reqs], dtype=torch.int32),
        block_table=table,
        slot_mapping=slots,
    )
    key_shape, value_shape = (num_blocks, kv_heads, head_dim, block_size), (num_blocks, kv_heads, block_size, head_dim)
    scales = None
    if dtype == torch.int8:
        key, value = (torch.randint(-127, 128, s, generator=rng, dtype=dtype) for s in (key_shape, value_shape))
        scales = torch.rand(num_blocks, kv_heads, 2, block_size, generator=rng) * 0.02
    else:
        key, value = (torch.randn(s, generator=rng).to(dtype) for s in (key_shape, value_shape))
    width = (heads + 2 * kv_heads) * head_dim
    angles = torch.rand(max(total for _, total in reqs), head_dim // 2, generator=rng) * 6
    norm = None
    if qk_norm != "none":
        q_width, k_width = (heads, kv_heads) if qk_norm == "full" else (1, 1)
        norm = (torch.rand(q_width * head_dim, generator=rng), torch.rand(k_width * head_dim, generator=rng), 1e-6)
    return AttentionCase(
        Shape(
            heads,
            kv_heads,
            head_dim,
            head_dim**-0.5,
            window,
            chunk,
            softcap,
            torch.randn(heads, generator=rng) if sinks else None,
        ),
        meta,
        LayerCache(key, value, scales),
        torch.randn(len(positions), width, generator=rng),
        positions,
        torch.cat([angles.cos(), angles.sin()], dim=1).contiguous(),
        norm,
    )
