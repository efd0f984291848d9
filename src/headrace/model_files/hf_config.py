"""`Architecture` from the ``config.json`` of a hub folder.

Owns what each family leaves unsaid: a key that is absent has the value that the family's reference implementation
gives it. One function per thing that families differ in, one row per family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from headrace.base.errors import ModelFileError
from headrace.config.architecture import Architecture, LayerKind, RopeConfig
from headrace.model_files.json_file import Fields
from headrace.model_files.rope import read_rope

Activation = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_LAYER_TYPES: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
}
_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _all_full(config: Fields, layer: int) -> LayerKind:
    return "full"


def _all_sliding(config: Fields, layer: int) -> LayerKind:
    return "sliding_window"


def _qwen_kind(config: Fields, layer: int) -> LayerKind:
    if not config.flag("use_sliding_window", False):
        return "full"
    return "sliding_window" if layer >= config.whole("max_window_layers", 28, minimum=0) else "full"


def _gemma2_kind(config: Fields, layer: int) -> LayerKind:
    return "sliding_window" if layer % 2 == 0 else "full"


def _gemma3_kind(config: Fields, layer: int) -> LayerKind:
    return "sliding_window" if (layer + 1) % config.whole("sliding_window_pattern", 6) else "full"


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family says without saying it in ``config.json``.

    ``num_kv_heads`` and ``head_dim`` of ``None`` follow from the number of heads and the hidden size.
    ``window`` is the default of ``sliding_window``; 0 means that an absent key is no window.
    """

    kind: Callable[[Fields, int], LayerKind] = _all_full
    norm_eps: float = 1e-6
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int = 2048
    original_max_position: int | None = None
    theta: float = 10000.0
    local_theta: float | None = None
    activation: str = "silu"
    tie_embeddings: bool = False
    biases: Literal["none", "qkv", "attention", "llama"] = "none"
    qk_norm: Literal["none", "head", "full"] = "none"
    windowed: bool = False
    window: int = 0
    gemma: bool = False
    attn_softcap: float = 0.0
    final_softcap: float = 0.0


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(biases="llama"),
    "MistralForCausalLM": _Family(kind=_all_sliding, num_kv_heads=8, max_position=131072, windowed=True, window=4096),
    "Qwen2ForCausalLM": _Family(
        kind=_qwen_kind, num_kv_heads=32, max_position=32768, biases="qkv", windowed=True, window=4096
    ),
    "Qwen3ForCausalLM": _Family(
        kind=_qwen_kind,
        num_kv_heads=32,
        head_dim=128,
        max_position=32768,
        biases="attention",
        qk_norm="head",
        windowed=True,
        window=4096,
    ),
    "Gemma2ForCausalLM": _Family(
        kind=_gemma2_kind,
        num_kv_heads=4,
        head_dim=256,
        max_position=8192,
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
        biases="attention",
        windowed=True,
        window=4096,
        gemma=True,
        attn_softcap=50.0,
        final_softcap=30.0,
    ),
    "Gemma3ForCausalLM": _Family(
        kind=_gemma3_kind,
        num_kv_heads=4,
        head_dim=256,
        max_position=131072,
        theta=1e6,
        local_theta=10000.0,
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
        biases="attention",
        qk_norm="head",
        windowed=True,
        window=4096,
        gemma=True,
    ),
    "Phi3ForCausalLM": _Family(
        kind=_all_sliding, norm_eps=1e-5, max_position=4096, original_max_position=4096, windowed=True
    ),
    "Olmo2ForCausalLM": _Family(norm_eps=1e-5, biases="attention", qk_norm="full"),
}
HF_ARCHITECTURES = tuple(_FAMILIES)


def architecture_from_config(config: Fields, eos_token_ids: tuple[int, ...]) -> Architecture:
    """Build the record.

    Args:
        config: the settings of ``config.json``.
        eos_token_ids: those of ``generation_config.json``, which win over the config's own when there are any.

    Raises:
        ModelFileError: unknown architecture, quantised checkpoint, or a missing or impossible setting.
    """
    name = _architecture_name(config)
    family = _FAMILIES[name]
    if (quantization := config.table("quantization_config")) is not None:
        method = quantization.get("quant_method") or "unknown"
        raise ModelFileError(
            f"{config.origin}: quantisation '{method}' is not supported; supported: safetensors in float32, float16 "
            "or bfloat16, and GGUF"
        )
    num_layers = config.whole("num_hidden_layers")
    hidden_size, num_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", family.head_dim or hidden_size // num_heads)
    max_position = config.whole("max_position_embeddings", family.max_position)
    kinds, window = _layer_kinds(config, family, num_layers)
    rope, local_rope = _ropes(config, family, head_dim, max_position)
    qkv_bias, output_bias, mlp_bias = _biases(config, family)
    dtype = _dtype(config)
    return Architecture(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.whole("num_key_value_heads", family.num_kv_heads or num_heads),
        head_dim=head_dim,
        vocab_size=config.whole("vocab_size"),
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", family.norm_eps),
        rope=rope,
        local_rope=local_rope,
        tie_embeddings=config.flag("tie_word_embeddings", family.tie_embeddings),
        layer_kinds=kinds,
        window=window,
        activation=_activation(config, family),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        norm_offset=1.0 if family.gemma else 0.0,
        embedding_scale=sqrt(hidden_size) if family.gemma else 1.0,
        query_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5 if family.gemma else None,
        attn_softcap=_softcap(config, family, "attn_logit_softcapping", family.attn_softcap),
        final_softcap=_softcap(config, family, "final_logit_softcapping", family.final_softcap),
        dtype=dtype,
        weight_format=_FORMATS[dtype],
        eos_token_ids=eos_token_ids or config.ids("eos_token_id"),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
    )


def _architecture_name(config: Fields) -> str:
    names = config.get("architectures")
    known = ", ".join(HF_ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise ModelFileError(f"{config.origin}: 'architectures' is missing; supported: {known}")
    for name in names:
        if name in _FAMILIES:
            return str(name)
    raise ModelFileError(f"{config.origin}: architecture {names[0]!r} is not supported; supported: {known}")


def _layer_kinds(config: Fields, family: _Family, num_layers: int) -> tuple[tuple[LayerKind, ...], int]:
    """Kind of each layer and the window of those that have one."""
    window = _window(config, family)
    if not window:
        return tuple("full" for _ in range(num_layers)), 0
    listed = config.get("layer_types")
    kinds: tuple[LayerKind, ...]
    if listed is None:
        kinds = tuple(family.kind(config, layer) for layer in range(num_layers))
    else:
        if not isinstance(listed, list) or len(listed) != num_layers or any(t not in _LAYER_TYPES for t in listed):
            raise ModelFileError(f"{config.origin}: 'layer_types' must list {num_layers} of {', '.join(_LAYER_TYPES)}")
        kinds = tuple(_LAYER_TYPES[t] for t in listed)
    return kinds, window if any(kind != "full" for kind in kinds) else 0


def _window(config: Fields, family: _Family) -> int:
    """Tokens that a sliding layer sees; 0 when the model has none. Here ``null`` differs from an absent key."""
    if not family.windowed or (family.kind is _qwen_kind and not config.flag("use_sliding_window", False)):
        return 0
    if "sliding_window" in config:
        return config.whole("sliding_window", 0, minimum=0)
    return family.window


def _ropes(config: Fields, family: _Family, head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary settings, and those of sliding layers where they differ."""
    settings = config.table("rope_parameters") or config.table("rope_scaling")
    local: Fields | None = None
    if settings is not None and ("full_attention" in settings or "sliding_attention" in settings):
        local = settings.table("sliding_attention")
        settings = settings.table("full_attention")
    partial = config.number("partial_rotary_factor", 1.0)
    if settings is not None:
        partial = settings.number("partial_rotary_factor", partial)
    rotary_dim = int(head_dim * partial)
    original = config.whole("original_max_position_embeddings", family.original_max_position or max_position)

    def resolve(table: Fields | None, theta: float) -> RopeConfig:
        return read_rope(
            table,
            theta=theta,
            rotary_dim=rotary_dim,
            max_position=max_position,
            original_max_position=original,
        )

    rope = resolve(settings, config.number("rope_theta", family.theta))
    if family.local_theta is None:
        return rope, None
    return rope, resolve(local, config.number("rope_local_base_freq", family.local_theta))


def _biases(config: Fields, family: _Family) -> tuple[bool, bool, bool]:
    """Whether the query-key-value, the attention output and the feed-forward products have biases."""
    if family.biases == "qkv":
        return True, False, False
    if family.biases == "none":
        return False, False, False
    attention = config.flag("attention_bias", False)
    return attention, attention, family.biases == "llama" and config.flag("mlp_bias", False)


def _activation(config: Fields, family: _Family) -> Activation:
    key = "hidden_activation" if family.gemma else "hidden_act"
    value = config.get(key) or family.activation
    if value not in _ACTIVATIONS:
        raise ModelFileError(
            f"{config.origin}: '{key}' {value!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def _softcap(config: Fields, family: _Family, key: str, default: float) -> float:
    """A cap of the Gemma families; ``null`` says that there is none, an absent key leaves the default."""
    if family.gemma and key in config:
        return config.number(key, 0.0)
    return default


def _dtype(config: Fields) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in _FORMATS:
        raise ModelFileError(f"{config.origin}: dtype {value!r} is not supported; supported: {', '.join(_FORMATS)}")
    return str(value)
