"""Small model files made by the formats' own reference libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Tensors = Mapping[str, np.ndarray]


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Tensors, alignment: int | None = None
) -> Path:
    """Write float tensors (as F32 or F16) and metadata; keys without a dot get the architecture in front."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        name = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
            case _:
                raise TypeError(f"{name}: {type(value)}")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shards(folder: Path, shards: Mapping[str, Tensors], weight_map: Mapping[str, str] | None = None) -> Path:
    """Write shards and their index; the index follows the shards unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name)
    index = weight_map or {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


LLAMA_METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def llama_tensors(**more: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that an architecture is read from."""
    return {
        "token_embd.weight": np.zeros((40, 32), np.float32),
        "blk.0.attn_q.weight": np.zeros((32, 32), np.float32),
        "blk.0.attn_output.weight": np.zeros((32, 32), np.float32),
        **{name.replace("__", "."): values for name, values in more.items()},
    }
