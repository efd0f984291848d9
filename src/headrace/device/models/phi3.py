"""Phi-3: q, k and v in one stored matrix, gate and up in another."""

from __future__ import annotations

from headrace.device.loading.name_maps import SourceKind
from headrace.device.loading.weights import Place, WeightMap
from headrace.device.models.decoder import Decoder


class Phi3Model(Decoder):
    """The common decoder over fused tensors."""

    def weight_map(self, kind: SourceKind) -> WeightMap:
        if kind == "gguf":
            qkv, gate_up = "blk.{layer}.attn_qkv", "blk.{layer}.ffn_up"
        else:
            qkv, gate_up = "model.layers.{layer}.self_attn.qkv_proj", "model.layers.{layer}.mlp.gate_up_proj"
        places: dict[str, Place | None] = {}
        for part in "qkv":
            places[f"layers.{part}"] = Place(f"{qkv}.weight", shared=True)
            places[f"layers.{part}_bias"] = Place(f"{qkv}.bias", shared=True)
        for part in ("gate", "up"):
            places[f"layers.{part}"] = Place(f"{gate_up}.weight", shared=True)
        return super().weight_map(kind).with_places(places)
