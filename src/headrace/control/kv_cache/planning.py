"""From memory to a `KVCacheConfig`: which layers share a block table, and how many blocks there are.

Block ids are shared by all groups and every layer has storage for every id, so one id costs the pages of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import ConfigError
from headrace.config.units import format_size

# The kinds file themselves in the registry when they are imported.
from headrace.control.kv_cache import chunked_local, full, sliding_window  # noqa: F401
from headrace.control.kv_cache.group import GROUP_KINDS
from headrace.messages.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec


def make_groups(layer_specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group the layers with equal specs, in the order of their first layer."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(layer_specs):
        layers.setdefault(spec, []).append(index)
    return tuple(KVCacheGroup(tuple(indices), spec) for spec, indices in layers.items())


def num_blocks_of_request(groups: Sequence[KVCacheGroup], num_tokens: int) -> int:
    """Most blocks that one request of ``num_tokens`` holds at once, over all groups."""
    return sum(GROUP_KINDS.get(group.spec.kind.value).max_blocks(group.spec, num_tokens) for group in groups)


def plan_kv_cache(
    layer_specs: Sequence[KVCacheSpec],
    available_bytes: int,
    max_model_len: int,
    block_size: int,
    num_blocks_override: int | None = None,
) -> KVCacheConfig:
    """Decide groups and number of blocks.

    Args:
        layer_specs: one per layer, as the attention backends chose them.
        available_bytes: what all blocks together may take.
        max_model_len: a request of this length must fit alone.
        block_size: tokens of a block.
        num_blocks_override: exact number of blocks, the null block included, whatever the memory.

    Raises:
        ConfigError: too little memory, with the size needed; a layer whose kind or block size cannot be served.
    """
    if not layer_specs:
        raise ConfigError("the model has no layer with a KV cache")
    for index, spec in enumerate(layer_specs):
        if spec.kind.value not in GROUP_KINDS:
            raise ConfigError(f"layer {index}: KV cache kind '{spec.kind.value}' is not supported")
        if spec.block_size != block_size:
            raise ConfigError(f"layer {index}: block size {spec.block_size} differs from --block-size {block_size}")
    groups = make_groups(layer_specs)
    bytes_per_block = sum(spec.page_bytes for spec in layer_specs)
    needed = num_blocks_of_request(groups, max_model_len) + 1
    if num_blocks_override is not None:
        num_blocks = num_blocks_override
    else:
        num_blocks = available_bytes // bytes_per_block
    if num_blocks < needed:
        room = format_size(num_blocks * bytes_per_block)
        raise ConfigError(
            f"one request of --max-model-len {max_model_len} needs {needed} KV blocks "
            f"({needed * bytes_per_block} bytes, {format_size(needed * bytes_per_block)}), but there is room for "
            f"{num_blocks} ({room}); raise --kv-cache-memory or lower --max-model-len"
        )
    return KVCacheConfig(num_blocks=num_blocks, block_size=block_size, groups=groups)


def max_concurrency(config: KVCacheConfig, max_model_len: int) -> float:
    """Requests of full length that fit at once."""
    return (config.num_blocks - 1) / num_blocks_of_request(config.groups, max_model_len)


def num_cache_tokens(config: KVCacheConfig, max_model_len: int) -> int:
    """Tokens that fit when all requests have full length; windowed groups count what they keep."""
    return int(max_concurrency(config, max_model_len) * max_model_len)


def describe(config: KVCacheConfig, max_model_len: int) -> str:
    """The start-up log line."""
    tokens, requests = num_cache_tokens(config, max_model_len), max_concurrency(config, max_model_len)
    return (
        f"KV cache: {tokens:,} tokens in {config.num_blocks - 1:,} blocks of {config.block_size}, "
        f"{requests:.2f} requests of {max_model_len:,} tokens at once"
    )
