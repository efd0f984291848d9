"""`Architecture` from the metadata and the tensor table of a GGUF file.

Owns where the format differs from a hub folder: names of keys, biases and tied embeddings known only from which tensors
exist, norm weights that already contain Gemma's offset, rotary divisors stored as tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import numpy as np

from headrace.base.errors import ModelFileError
from headrace.config.architecture import Architecture, LayerKind, RopeConfig
from headrace.model_files.gguf import GGUFFile
from headrace.model_files.rope import make_longrope, make_yarn_factors, yarn_magnitude


@dataclass(frozen=True, slots=True)
class _Family:
    """One architecture name of the format. ``window_period`` of n makes every n-th layer a full one; 1 makes none."""

    name: str
    qk_norm: Literal["none", "head", "full"] = "none"
    gemma: bool = False
    window_period: int = 0
    theta: float = 10000.0
    local_theta: float | None = None
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    wide_layers: int = 0


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm="head"),
    "gemma2": _Family(
        "Gemma2ForCausalLM", gemma=True, window_period=2, attn_softcap=50.0, final_softcap=30.0, wide_layers=46
    ),
    "gemma3": _Family(
        "Gemma3ForCausalLM",
        qk_norm="head",
        gemma=True,
        window_period=6,
        theta=1e6,
        local_theta=10000.0,
        wide_layers=62,
    ),
    "phi3": _Family("Phi3ForCausalLM", window_period=1),
    "olmo2": _Family("Olmo2ForCausalLM", qk_norm="full"),
}
GGUF_ARCHITECTURES = tuple(_FAMILIES)
# Control tokens that end a turn, whatever the file says about its end-of-sequence id.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
_CONTROL = 3


class _Metadata:
    """Keys of the model's architecture, checked on reading."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, "is missing" if value is None else f"is {value!r}, not a number")
        # Stored in single precision: the shortest decimal is the number that was meant.
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "is missing" if value is None else f"is {value!r}, not one positive number")
        return value

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: metadata '{self._prefix}.{key}' {problem}")


def architecture_from_gguf(file: GGUFFile) -> Architecture:
    """Build the record.

    Raises:
        ModelFileError: unknown architecture, or a missing or impossible setting.
    """
    kind = file.metadata.get("general.architecture")
    if kind not in _FAMILIES:
        raise ModelFileError(
            f"{file.path}: architecture {kind!r} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    family, metadata = _FAMILIES[kind], _Metadata(file, kind)
    if metadata.get("expert_count"):
        raise metadata.fail("expert_count", "asks for a mixture of experts, which this architecture does not support")
    if kind == "olmo2" and metadata.get("attention.sliding_window"):
        raise metadata.fail("attention.sliding_window", "belongs to a later family, which is not supported")
    num_layers, hidden_size = metadata.whole("block_count"), metadata.whole("embedding_length")
    num_heads = metadata.whole("attention.head_count")
    head_dim = metadata.whole("attention.key_length", hidden_size // num_heads)
    kinds, window = _layer_kinds(metadata, family, num_layers)
    rope, local_rope = _ropes(file, metadata, family, head_dim)
    names, weight_format = file.tensors, _weight_format(file)
    return Architecture(
        name=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=metadata.whole("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.info("token_embd.weight").shape[0],
        max_position=metadata.whole("context_length"),
        norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=local_rope,
        tie_embeddings="output.weight" not in names,
        layer_kinds=kinds,
        window=window,
        activation="gelu_tanh" if family.gemma else "silu",
        qkv_bias="blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm=family.qk_norm,
        embedding_scale=sqrt(hidden_size) if family.gemma else 1.0,
        query_scale=_query_scale(family, num_layers, hidden_size, num_heads, head_dim),
        attn_softcap=metadata.number("attn_logit_softcapping", family.attn_softcap),
        final_softcap=metadata.number("final_logit_softcapping", family.final_softcap),
        dtype={"F16": "float16", "BF16": "bfloat16"}.get(weight_format, "float32"),
        weight_format=weight_format,
        eos_token_ids=eos_ids_from_gguf(file),
        bos_token_id=_token_id(file, "bos_token_id"),
    )


def eos_ids_from_gguf(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end a generation: those the file names, then control tokens that end a turn."""
    ids = [_token_id(file, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    tokens, types = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get("tokenizer.ggml.token_type", [])
    ids += [i for i, kind in enumerate(types) if kind == _CONTROL and i < len(tokens) and tokens[i] in _TURN_ENDS]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _token_id(file: GGUFFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and value >= 0 else None


def _layer_kinds(metadata: _Metadata, family: _Family, num_layers: int) -> tuple[tuple[LayerKind, ...], int]:
    window = metadata.get("attention.sliding_window") or 0
    if not family.window_period or not window:
        return tuple("full" for _ in range(num_layers)), 0
    pattern = metadata.get("attention.sliding_window_pattern", family.window_period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise metadata.fail("attention.sliding_window_pattern", f"has not {num_layers} entries")
        slides = [bool(entry) for entry in pattern]
    else:
        slides = [pattern == 1 or (layer + 1) % pattern != 0 for layer in range(num_layers)]
    return tuple("sliding_window" if s else "full" for s in slides), window


def _query_scale(family: _Family, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float | None:
    """Gemma scales by the head's size, except that its widest model scales by hidden size per head."""
    if not family.gemma:
        return None
    return 1 / sqrt(hidden_size / num_heads if num_layers == family.wide_layers else head_dim)


def _ropes(file: GGUFFile, metadata: _Metadata, family: _Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    rotary_dim = metadata.whole("rope.dimension_count", head_dim)
    theta = metadata.number("rope.freq_base", family.theta)
    rope = _scaled_rope(file, metadata, theta, rotary_dim)
    if family.local_theta is None:
        return rope, None
    return rope, RopeConfig(metadata.number("rope.freq_base_swa", family.local_theta), rotary_dim)


def _scaled_rope(file: GGUFFile, metadata: _Metadata, theta: float, rotary_dim: int) -> RopeConfig:
    max_position = metadata.whole("context_length")
    original = float(metadata.whole("rope.scaling.original_context_length", max_position))
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    if "rope_factors_long.weight" in file.tensors:
        long_factors, short_factors = (
            _divisors(file, f"rope_factors_{n}.weight", rotary_dim) for n in ("long", "short")
        )
        return make_longrope(theta, rotary_dim, original, attention, long_factors, short_factors)
    if "rope_freqs.weight" in file.tensors:
        divisors = _divisors(file, "rope_freqs.weight", rotary_dim)
        return make_longrope(theta, rotary_dim, original, 1.0, divisors, divisors)
    scaling = metadata.get("rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    if scaling == "linear" or (scaling == "none" and metadata.get("rope.scale_linear")):
        return RopeConfig(theta, rotary_dim, "linear", (("factor", factor),))
    if scaling == "yarn":
        factors = make_yarn_factors(
            factor,
            original,
            attention * yarn_magnitude(factor),
            beta_fast=metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        return RopeConfig(theta, rotary_dim, "yarn", factors)
    if scaling != "none":
        raise metadata.fail("rope.scaling.type", f"is {scaling!r}; supported: none, linear, yarn")
    return RopeConfig(theta, rotary_dim)


def _divisors(file: GGUFFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    """One divisor per rotary frequency."""
    info = file.info(name)
    if info.type_name != "F32" or info.shape != (rotary_dim // 2,):
        raise ModelFileError(
            f"{file.path}: tensor '{name}' is {info.type_name} {list(info.shape)} instead of F32 [{rotary_dim // 2}]"
        )
    return tuple(file.raw(name).view(np.float32).tolist())


def _weight_format(file: GGUFFile) -> str:
    """The format that holds most of the layers' weights."""
    sizes: Counter[str] = Counter()
    for info in file.tensors.values():
        if info.name.startswith("blk.") and len(info.shape) > 1:
            sizes[info.type_name] += info.nbytes
    if not sizes:
        raise ModelFileError(f"{file.path}: has no tensors of layers ('blk.…')")
    return sizes.most_common(1)[0][0]
