"""Where the slots of a decoder lie in the two kinds of checkpoint, before a family's own changes."""

from __future__ import annotations

from typing import Literal

from headrace.device.loading.weights import Place, WeightMap

SourceKind = Literal["hf", "gguf"]

_HF_LAYER = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}

_GGUF_LAYER = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "input_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
}

HF_MAP = WeightMap(
    places={
        "embedding": Place("model.embed_tokens.weight"),
        "head": Place("lm_head.weight"),
        "final_norm": Place("model.norm.weight"),
        **{f"layers.{slot}": Place(f"model.layers.{{layer}}.{name}") for slot, name in _HF_LAYER.items()},
    },
    ignore=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
HF_TIED_HEAD = r"lm_head\.weight"
"""Some writers store the head of a tied model too; the configuration decides."""

GGUF_MAP = WeightMap(
    places={
        "embedding": Place("token_embd.weight"),
        "head": Place("output.weight"),
        "final_norm": Place("output_norm.weight"),
        **{f"layers.{slot}": Place(f"blk.{{layer}}.{name}") for slot, name in _GGUF_LAYER.items()},
    },
    # Rotary divisors are part of the architecture record, which has been read from them.
    ignore=(r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight"),
)


def hf_layer(name: str) -> Place:
    """A tensor of one layer in Hugging Face's naming."""
    return Place(f"model.layers.{{layer}}.{name}.weight")


def gguf_layer(name: str) -> Place:
    """A tensor of one layer in GGUF's naming."""
    return Place(f"blk.{{layer}}.{name}.weight")
