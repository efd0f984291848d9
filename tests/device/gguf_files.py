"""Writes tiny models as GGUF files the way converters do; names come from the `gguf` package's own tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as QType

from headrace.device.quantization.raw_tensor import RawTensor

ARCHES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
}


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from two halves to pairs side by side."""
    rows = len(values)
    return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    model: Any,
    path: Path,
    qtype: QType = QType.F32,
    *,
    drop: Callable[[str], bool] = lambda name: False,
    packed: Mapping[str, RawTensor] | None = None,
) -> Path:
    """Write a `transformers` model; matrices in ``qtype``, vectors in float32.

    Args:
        drop: says which tensors (by GGUF name) to leave out.
        packed: bytes to write in place of the parameters of these names.
    """
    packed = packed or {}
    config = model.config
    arch = ARCHES[type(model).__name__]
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        raw = packed.get(name)
        values = raw.data if raw is not None else parameter.to(torch.float32).numpy()
        if arch == "llama" and ".q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if drop(gguf_name):
            continue
        kind = qtype if values.ndim == 2 else QType.F32
        data = values if raw is not None else gguf.quants.quantize(values, kind)
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
    _write_rope_tensors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return dict(rope.get("full_attention", rope))


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    rope = _rope(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None) and arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / rope["original_max_position_embeddings"]
        amplitude = math.sqrt(1 + math.log(stretch) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(amplitude)


def _write_rope_tensors(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        divisors = []
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        original, dim = rope["original_max_position_embeddings"], _head_dim(config)
        for i in range(0, dim, 2):
            wave = 2 * math.pi * rope["rope_theta"] ** (i / dim)
            if wave < original / high:
                divisors.append(1.0)
            elif wave > original / low:
                divisors.append(rope["factor"])
            else:
                smooth = (original / wave - low) / (high - low)
                divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    if rope["rope_type"] == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))


def quantize_like_file(model: Any, qtype: QType) -> None:
    """Replace the model's matrices by what a file in ``qtype`` gives back."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                packed = gguf.quants.quantize(parameter.numpy(), qtype)
                values = gguf.quants.dequantize(packed, qtype).reshape(parameter.shape)
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)))
