"""KV blocks as CPU kernels read them: keys ``[kv_head, head_dim, token]``, values ``[kv_head, token, head_dim]``.

With tokens innermost in keys and dimensions innermost in values, both products of attention broadcast one query value
over a vector and need no horizontal sums. Int8 blocks bring float32 scales ``[kv_head, side, token]``, keys first.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

from headrace.device.attention.backend import LayerFacts
from headrace.device.attention.metadata import LayerCache
from headrace.messages.kv_cache import KVCacheKind, KVCacheSpec, KVTensorLayout

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


_HUGE_PAGE = 2 << 20


def _make_layout(name: str, dims: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> KVTensorLayout:
    strides = tuple(prod(shape[i:]) for i in range(len(shape) + 1))
    return KVTensorLayout(name=name, dims=dims, block_shape=shape, dtype=dtype, strides=strides)


def make_cpu_spec(facts: LayerFacts, block_size: int, kv_dtype: str) -> KVCacheSpec:
    """The spec of one layer with contiguous blocks."""
    heads, head_dim = facts.num_kv_heads, facts.head_dim
    tensors = [
        _make_layout("key", ("kv_head", "head_dim", "token"), (heads, head_dim, block_size), kv_dtype),
        _make_layout("value", ("kv_head", "token", "head_dim"), (heads, block_size, head_dim), kv_dtype),
    ]
    if kv_dtype == "int8":
        tensors.append(_make_layout("scales", ("kv_head", "side", "token"), (heads, 2, block_size), "float32"))
    kind = KVCacheKind.FULL
    if facts.window or facts.chunk:
        kind = KVCacheKind.SLIDING_WINDOW if facts.window else KVCacheKind.CHUNKED_LOCAL
    return KVCacheSpec(
        kind=kind,
        block_size=block_size,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=kv_dtype,
        tensors=tuple(tensors),
        page_bytes=sum(t.block_elements * _DTYPES[t.dtype].itemsize for t in tensors),
        window=facts.window or facts.chunk,
    )


def allocate_cpu_blocks(spec: KVCacheSpec, num_blocks: int) -> LayerCache:
    """Zeroed blocks: masked reads of the null block must find finite numbers."""
    return LayerCache(*(_make_zeros((num_blocks, *t.block_shape), _DTYPES[t.dtype]) for t in spec.tensors))


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in huge pages where the system has them.

    Attention jumps from block to block, and with small pages every jump is a walk through the page table too.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
