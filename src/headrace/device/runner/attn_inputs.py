"""Attention metadata of a step, one record per KV cache group."""

from __future__ import annotations

from headrace.device.attention.metadata import AttentionMetadata
from headrace.device.runner.input_batch import InputBatch, InputBuffers


def prepare_attn(batch: InputBatch, buffers: InputBuffers, padded_tokens: int) -> list[AttentionMetadata]:
    """Views of the buffers; tokens from ``batch.num_tokens`` to ``padded_tokens`` are padding without a slot."""
    num_reqs = batch.num_reqs
    return [
        AttentionMetadata(
            num_tokens=padded_tokens,
            num_reqs=num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=max(batch.seq_lens, default=0),
            query_start_loc=buffers.query_start_loc.torch[: num_reqs + 1],
            seq_lens=buffers.seq_lens.torch[:num_reqs],
            block_table=blocks.torch[:num_reqs],
            slot_mapping=slots.torch[:padded_tokens],
        )
        for blocks, slots in zip(buffers.block_tables, buffers.slot_mappings, strict=True)
    ]


def whole_buffers(buffers: InputBuffers) -> list[AttentionMetadata]:
    """The metadata of the largest step, for a capture: all of every buffer, whatever it holds."""
    max_reqs = len(buffers.seq_lens.np)
    return [
        AttentionMetadata(
            num_tokens=buffers.max_tokens,
            num_reqs=max_reqs,
            max_query_len=buffers.max_tokens,
            max_seq_len=buffers.max_tokens,
            query_start_loc=buffers.query_start_loc.torch,
            seq_lens=buffers.seq_lens.torch,
            block_table=blocks.torch,
            slot_mapping=slots.torch,
        )
        for blocks, slots in zip(buffers.block_tables, buffers.slot_mappings, strict=True)
    ]
