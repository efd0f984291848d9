"""OLMo 2: norms only after each half, and norms over whole q and k."""

from __future__ import annotations

from headrace.device.layers.decoder_layer import PostNormLayer
from headrace.device.loading.name_maps import SourceKind, gguf_layer, hf_layer
from headrace.device.loading.weights import WeightMap
from headrace.device.models.decoder import Decoder


class Olmo2Model(Decoder):
    """Post-norm layers."""

    layer_class = PostNormLayer

    def weight_map(self, kind: SourceKind) -> WeightMap:
        layer = gguf_layer if kind == "gguf" else hf_layer
        names = ("post_attention_norm", "post_ffw_norm")
        if kind == "hf":
            names = ("post_attention_layernorm", "post_feedforward_layernorm")
        return (
            super()
            .weight_map(kind)
            .with_places(
                {
                    "layers.input_norm": None,
                    "layers.mlp_norm": None,
                    "layers.post_attn_norm": layer(names[0]),
                    "layers.post_mlp_norm": layer(names[1]),
                }
            )
        )
