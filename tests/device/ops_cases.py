"""Shapes, metadata and straightforward mathematics to compare every implementation of the operators with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.device.attention.metadata import AttentionMetadata, LayerCache


@dataclass
class Shape:
    """The facts of one attention layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    scale: float = 0.25
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass
class PagedCase:
    """Requests with their whole keys and values, and the same as a step over a paged cache."""

    shape: Shape
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    meta: AttentionMetadata
    cache: LayerCache


def make_paged_case(
    shape: Shape,
    lens: list[tuple[int, int]],
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: bool = True,
) -> PagedCase:
    """Build a case.

    Args:
        lens: new tokens and tokens in all of each request.
        poison: fill everything that no request may see with NaN, block 0 apart.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-total // block_size) for _, total in lens]
    num_blocks = sum(counts) + 3
    order = (torch.randperm(num_blocks - 1, generator=g) + 1).tolist()
    fill = math.nan if poison else 0.0
    key = torch.full((num_blocks, shape.num_kv_heads, shape.head_dim, block_size), fill, dtype=dtype)
    value = torch.full((num_blocks, shape.num_kv_heads, block_size, shape.head_dim), fill, dtype=dtype)
    key[0], value[0] = 0, 0
    table = torch.zeros(len(lens), max(counts) + 2, dtype=torch.int32)
    starts, slots, queries, keys, values = [0], [], [], [], []
    for i, (new, total) in enumerate(lens):
        blocks = [order.pop() for _ in range(counts[i])]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        table[i, len(blocks) :] = order[0]  # what a longer request left behind
        queries.append(torch.randn(new, shape.num_heads, shape.head_dim, generator=g))
        keys.append(torch.randn(total, shape.num_kv_heads, shape.head_dim, generator=g))
        values.append(torch.randn(total, shape.num_kv_heads, shape.head_dim, generator=g))
        for position in range(total):
            block, offset = blocks[position // block_size], position % block_size
            key[block, :, :, offset] = keys[-1][position].to(dtype)
            value[block, :, offset] = values[-1][position].to(dtype)
            if position >= total - new:
                slots.append(block * block_size + offset)
        starts.append(starts[-1] + new)
    meta = AttentionMetadata(
        num_tokens=starts[-1],
        num_reqs=len(lens),
        max_query_len=max(new for new, _ in lens),
        max_seq_len=max(total for _, total in lens),
        query_start_loc=torch.tensor([*starts, 0, 0], dtype=torch.int32),
        seq_lens=torch.tensor([*(total for _, total in lens), 0], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
    return PagedCase(shape, queries, keys, values, meta, LayerCache(key, value))


def expected_attention(case: PagedCase) -> torch.Tensor:
    """One query, one head, one key at a time, in float64."""
    shape, rows = case.shape, []
    for query, key, value in zip(case.queries, case.keys, case.values, strict=True):
        key = key.to(case.cache.key.dtype).double()
        value = value.to(case.cache.value.dtype).double()
        for t in range(len(query)):
            position = len(key) - len(query) + t
            seen = [
                s
                for s in range(position + 1)
                if (not shape.window or s > position - shape.window)
                and (not shape.chunk or s // shape.chunk == position // shape.chunk)
            ]
            for head in range(shape.num_heads):
                kv_head = head * shape.num_kv_heads // shape.num_heads
                scores = key[seen, kv_head] @ query[t, head].double() * shape.scale
                if shape.softcap:
                    scores = shape.softcap * torch.tanh(scores / shape.softcap)
                weights = scores.exp()
                total = weights.sum()
                if shape.sinks is not None:
                    total = total + shape.sinks[head].double().exp()
                rows.append(weights / total @ value[seen, kv_head])
    return torch.stack(rows).reshape(case.meta.num_tokens, -1).to(torch.float32)


def expected_rotation(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + rotary_dim / 2) of ``[T, heads, head_dim]`` turned as a complex number."""
    half = cos_sin.shape[1] // 2
    turn = torch.complex(cos_sin[positions.long(), :half].double(), cos_sin[positions.long(), half:].double())
    x = x.double()
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1).to(torch.float32)
