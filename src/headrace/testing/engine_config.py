"""An `EngineConfig` without a model: a tiny architecture on an imagined machine."""

from __future__ import annotations

from typing import Any

from headrace.config.architecture import Architecture, RopeConfig
from headrace.config.hardware import HardwareInfo
from headrace.config.resolve import resolve
from headrace.config.sections import EngineConfig

TINY_HARDWARE = HardwareInfo(
    platform="cpu",
    num_cores=2,
    total_memory_bytes=8 << 30,
    available_memory_bytes=4 << 30,
)


def make_architecture(**changes: Any) -> Architecture:
    """A two-layer decoder with a vocabulary of 1,000 tokens, changed as asked."""
    values: dict[str, Any] = {
        "name": "LlamaForCausalLM",
        "num_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 1000,
        "max_position": 512,
        "norm_eps": 1e-5,
        "rope": RopeConfig(rotary_dim=8),
        "tie_embeddings": True,
        "eos_token_ids": (2,),
    }
    values.update(changes)
    values.setdefault("layer_kinds", ("full",) * values["num_layers"])
    return Architecture(**values)


def make_engine_config(architecture: Architecture | None = None, **settings: Any) -> EngineConfig:
    """Resolve ``settings`` (by field name) as the command line would, for a model that has no files.

    Small numbers by default: blocks of 4 tokens, 64 of them, 8 requests at once, one step in flight, prompts as fast
    as they go.
    """
    defaults: dict[str, Any] = {
        "model": "simulated",
        "block_size": 4,
        "num_kv_blocks": 65,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "pipeline_depth": 1,
        "max_token_gap_factor": 0.0,
    }
    return resolve(
        defaults | settings,
        TINY_HARDWARE,
        architecture or make_architecture(),
        "simulated",
    )
