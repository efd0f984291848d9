"""Gemma 2 and 3: norms before and after each half, soft caps or head norms, windows on most layers.

Checkpoints of Hugging Face store norm weights less one; GGUF files store them whole.
"""

from __future__ import annotations

from headrace.device.layers.decoder_layer import SandwichNormLayer
from headrace.device.loading.name_maps import SourceKind, gguf_layer, hf_layer
from headrace.device.loading.weights import WeightMap
from headrace.device.models.decoder import Decoder


class GemmaModel(Decoder):
    """Both generations: what differs is in the architecture record."""

    layer_class = SandwichNormLayer

    def weight_map(self, kind: SourceKind) -> WeightMap:
        base = super().weight_map(kind)
        if kind == "gguf":
            return base.with_places(
                {
                    "layers.post_attn_norm": gguf_layer("post_attention_norm"),
                    "layers.post_mlp_norm": gguf_layer("post_ffw_norm"),
                }
            )
        return base.with_places(
            {
                "layers.post_attn_norm": hf_layer("post_attention_layernorm"),
                "layers.mlp_norm": hf_layer("pre_feedforward_layernorm"),
                "layers.post_mlp_norm": hf_layer("post_feedforward_layernorm"),
            }
        )
