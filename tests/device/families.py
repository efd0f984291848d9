"""Configurations of tiny models of every family, and their making with `transformers`, the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.3 * i for i in range(pairs)],
        "original_max_position_embeddings": 32,
    }


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-wide": ("Llama", {"hidden_size": 256, "intermediate_size": 256}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma2-head-scale": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    ),
    "gemma3-head-scale": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    ),
    "gemma3-linear": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-window": ("Phi3", {"sliding_window": 8}),
    "phi3-longrope": (
        "Phi3",
        {
            "sliding_window": None,
            "rope_parameters": _longrope(6) | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo2": ("Olmo2", {}),
}


def make_hf_model(family: str, seed: int = 0) -> Any:
    """A random model in float32 whose every parameter matters (norms and biases too)."""
    prefix, changes = FAMILIES[family]
    name = {"Gemma3": "Gemma3Text"}.get(prefix, prefix)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                base = 0.0 if prefix.startswith("Gemma") or parameter_name.endswith("bias") else 1.0
                parameter.copy_(base + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model


def save_hf_model(model: Any, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Write the model as safetensors, in shards when it is larger than a shard."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def hf_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The oracle's logits of every token."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].to(torch.float32)
