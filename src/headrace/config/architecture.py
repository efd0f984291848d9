"""What a model is made of, as one record for every family and file format.

``model_files`` reads it from ``config.json`` or GGUF metadata; ``device.models`` builds from it. Nothing here reads
files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "sliding_window", "chunked_local"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    ``scaling`` names the rule (``none``, ``linear``, ``llama3``, ``yarn``, ``longrope``); its numbers are in
    ``factors`` under the names that `model_files.rope` lists, every default already filled in. ``long_factors`` and
    ``short_factors`` divide the frequencies one by one (``longrope``): the long ones when sequences may pass
    ``original_max_position``, the short ones otherwise; a file that fixes its divisors has the same list twice.
    ``attention_factor`` multiplies cos and sin. The first ``rotary_dim`` dimensions of each head are turned, in the
    half-split (NeoX) pairing.
    """

    theta: float = 10000.0
    rotary_dim: int = 0
    scaling: str = "none"
    factors: tuple[tuple[str, float], ...] = ()
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a decoder.

    ``name`` is the HF architecture (``LlamaForCausalLM``), also for GGUF files. ``vocab_size`` is the number of rows
    of the head, which may be more than the tokenizer has. ``layer_kinds`` has one entry per layer. ``weight_format``
    is how most matrices are stored in the file (``F32``, ``BF16``, ``Q4_1``, …). ``window`` is how many tokens a
    sliding layer sees, the current one included; sliding layers use ``local_rope`` when there is one. ``query_scale``
    multiplies the attention scores (``None``: 1 / sqrt(head_dim)). ``norm_offset`` is added to norm weights as they
    lie in the file.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    layer_kinds: tuple[LayerKind, ...]
    window: int = 0
    local_rope: RopeConfig | None = None
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    dtype: str = "float32"
    weight_format: str = "F32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
