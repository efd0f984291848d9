"""Paged attention in plain PyTorch over the CPU layout of KV blocks.

Requests with one new token are computed together, padded to the longest; the others one at a time over just the keys
that they can see. Masked values are replaced by zero before the product, so that whatever a stale block holds (even a
NaN of a request that failed) cannot reach another request.
"""

from __future__ import annotations

import torch

from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.ops.interface import AttentionShape

# Padded keys of one batch of decode rows, and scores of one slice of a prompt, stay below this many elements.
_MAX_ELEMENTS = 1 << 24
_MAX_FLOAT16 = 65504.0


def store_kv(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, cache: LayerCache) -> None:
    """Write ``[T, kv_heads, head_dim]`` keys and values to their slots; slots of -1 write nothing."""
    block_size = cache.value.shape[2]
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if cache.scales is not None:
        key, cache.scales[block, :, 0, offset] = _quantize(key)
        value, cache.scales[block, :, 1, offset] = _quantize(value)
    elif cache.key.dtype == torch.float16:
        key, value = key.clamp(-_MAX_FLOAT16, _MAX_FLOAT16), value.clamp(-_MAX_FLOAT16, _MAX_FLOAT16)
    cache.key[block, :, :, offset] = key.to(cache.key.dtype)
    cache.value[block, :, offset] = value.to(cache.value.dtype)


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and the scale of each token and head of ``[T, kv_heads, head_dim]``."""
    x = x.to(torch.float32)
    largest = x.abs().amax(dim=-1)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (x * inverse[..., None]).round().clamp(-127, 127), largest * (1.0 / 127.0)


def _read(cache: LayerCache, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[n, kv_head, head_dim, token]`` and values ``[n, kv_head, token, head_dim]`` of blocks in float32."""
    key = cache.key.index_select(0, blocks).to(torch.float32)
    value = cache.value.index_select(0, blocks).to(torch.float32)
    if cache.scales is not None:
        scales = cache.scales.index_select(0, blocks)
        key, value = key * scales[:, :, 0, None, :], value * scales[:, :, 1, :, None]
    return key, value


def paged_attention(q: torch.Tensor, shape: AttentionShape, meta: AttentionMetadata, cache: LayerCache) -> torch.Tensor:
    """Attention of each request's new tokens over its blocks, ``[T, heads * head_dim]``."""
    starts = meta.query_start_loc[: meta.num_reqs + 1].tolist()
    seq_lens = meta.seq_lens[: meta.num_reqs].tolist()
    out = torch.zeros_like(q)
    decodes: list[int] = []
    for i, seq_len in enumerate(seq_lens):
        start, stop = starts[i], starts[i + 1]
        if stop - start == 1:
            decodes.append(i)
            continue
        rows = max(1, _MAX_ELEMENTS // (shape.num_heads * max(seq_len, 1)))
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            out[first:last] = _extend(q[first:last], seq_len - (stop - last), meta.block_table[i], shape, cache)
    if decodes:
        decodes.sort(key=lambda i: seq_lens[i])
        for batch in _decode_batches(decodes, seq_lens, shape):
            rows = torch.tensor([starts[i] for i in batch])
            lens = [seq_lens[i] for i in batch]
            out[rows] = _decode(q[rows], lens, meta.block_table[torch.tensor(batch)], shape, cache)
    return out


def _decode_batches(decodes: list[int], seq_lens: list[int], shape: AttentionShape) -> list[list[int]]:
    """Cut requests (in ascending order of length) so that no padded batch grows too large."""
    batches: list[list[int]] = [[]]
    width = shape.num_kv_heads * shape.head_dim
    for i in decodes:
        if batches[-1] and (len(batches[-1]) + 1) * seq_lens[i] * width > _MAX_ELEMENTS:
            batches.append([])
        batches[-1].append(i)
    return batches


def _first_visible(position: int, shape: AttentionShape) -> int:
    """The oldest key that the query at ``position`` may see."""
    first = position - shape.window + 1 if shape.window else 0
    if shape.chunk:
        first = max(first, position // shape.chunk * shape.chunk)
    return max(first, 0)


def _visible(query: torch.Tensor, key: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Mask over broadcast positions: which keys a query may see."""
    mask = key <= query
    if shape.window:
        mask = mask & (key > query - shape.window)
    if shape.chunk:
        mask = mask & (key // shape.chunk == query // shape.chunk)
    return mask


def _weights(scores: torch.Tensor, mask: torch.Tensor, shape: AttentionShape, rows_per_head: int) -> torch.Tensor:
    """Softmax over the last dimension of ``[..., kv_head, group * rows, key]`` with soft cap, mask and sinks."""
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if shape.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = shape.sinks.view(shape.num_kv_heads, -1, 1).expand(-1, -1, rows_per_head).reshape(shape.num_kv_heads, -1, 1)
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1]


def _decode(
    q: torch.Tensor, seq_lens: list[int], block_table: torch.Tensor, shape: AttentionShape, cache: LayerCache
) -> torch.Tensor:
    """One query per request: ``q`` is ``[R, heads * head_dim]``."""
    block_size = cache.value.shape[2]
    num_reqs, heads = len(seq_lens), shape.num_kv_heads
    first_block = _first_visible(seq_lens[0] - 1, shape) // block_size
    last_block = (seq_lens[-1] + block_size - 1) // block_size
    blocks = block_table[:, first_block:last_block].reshape(-1)
    key, value = _read(cache, blocks)
    key = key.view(num_reqs, -1, heads, shape.head_dim, block_size).permute(0, 2, 3, 1, 4).flatten(3)
    value = value.view(num_reqs, -1, heads, block_size, shape.head_dim).permute(0, 2, 1, 3, 4).flatten(2, 3)

    positions = torch.arange(first_block * block_size, last_block * block_size)
    mask = _visible(torch.tensor(seq_lens)[:, None] - 1, positions[None, :], shape)[:, None, :]
    queries = q.to(torch.float32).view(num_reqs, heads, -1, shape.head_dim) * shape.scale
    weights = _weights(queries @ key, mask[:, None], shape, 1)
    value = value.masked_fill(~mask[..., None], 0.0)
    return (weights @ value).reshape(num_reqs, -1).to(q.dtype)


def _extend(
    q: torch.Tensor, seq_len: int, block_row: torch.Tensor, shape: AttentionShape, cache: LayerCache
) -> torch.Tensor:
    """All new tokens of one request: ``q`` is ``[n, heads * head_dim]``."""
    block_size = cache.value.shape[2]
    num_tokens, heads = len(q), shape.num_kv_heads
    group = shape.num_heads // heads
    first = _first_visible(seq_len - num_tokens, shape)
    first_block = first // block_size
    blocks = block_row[first_block : (seq_len + block_size - 1) // block_size]
    base = first_block * block_size
    key, value = _read(cache, blocks)
    key, value = key.permute(1, 2, 0, 3).flatten(2), value.transpose(0, 1).flatten(1, 2)
    key, value = key[:, :, first - base : seq_len - base], value[:, first - base : seq_len - base]

    mask = _visible(torch.arange(seq_len - num_tokens, seq_len)[:, None], torch.arange(first, seq_len)[None, :], shape)
    queries = q.to(torch.float32).view(num_tokens, heads, group, shape.head_dim).permute(1, 2, 0, 3) * shape.scale
    scores = queries.reshape(heads, group * num_tokens, shape.head_dim) @ key
    weights = _weights(scores, mask.repeat(group, 1), shape, num_tokens)
    out = (weights @ value).view(heads, group, num_tokens, shape.head_dim)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, -1).to(q.dtype)
