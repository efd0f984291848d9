"""Llama 2 and 3, and what has their shape: SmolLM2, Mistral with its sliding window."""

from __future__ import annotations

from dataclasses import replace

from headrace.device.loading.name_maps import SourceKind
from headrace.device.loading.weights import WeightMap
from headrace.device.models.decoder import Decoder

_ROTATED_SLOTS = ("layers.q", "layers.k", "layers.q_bias", "layers.k_bias")


class LlamaModel(Decoder):
    """GGUF files of this family keep rotary pairs side by side, so rows of q and k are put back into halves."""

    def weight_map(self, kind: SourceKind) -> WeightMap:
        base = super().weight_map(kind)
        if kind == "hf":
            return base
        return base.with_places({slot: replace(base.places[slot], interleaved_rotary=True) for slot in _ROTATED_SLOTS})
