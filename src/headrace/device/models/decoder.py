"""The decoder that every family here shares; a family says where norms stand and how its tensors are named.

Owns the layers of this pipeline stage and the way of the hidden states through them. The forward consists of `Ops`
methods and views alone, which is what lets a captured plan hold all of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.base.errors import ModelFileError
from headrace.config.architecture import Architecture
from headrace.device.attention.backend import AttentionBackend, LayerFacts
from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import IntermediateTensors, ParallelGroups
from headrace.device.layers.decoder_layer import DecoderLayer, PreNormLayer
from headrace.device.layers.embedding import Vocabulary
from headrace.device.layers.norm import RMSNorm
from headrace.device.layers.rope import make_rope_table
from headrace.device.loading.name_maps import GGUF_MAP, HF_MAP, HF_TIED_HEAD, SourceKind
from headrace.device.loading.weights import WeightMap, WeightReader
from headrace.device.ops.interface import Ops


class Decoder:
    """A causal language model, or the part of it that this pipeline stage holds.

    Args:
        arch: sizes and switches.
        ops: what computes.
        backend: what attends, and lays out the KV blocks.
        parallel: the groups that this rank is in; alone by default.
        max_position: the longest sequence served; rotary tables reach this far.
    """

    layer_class: type[DecoderLayer] = PreNormLayer

    def __init__(
        self,
        arch: Architecture,
        ops: Ops,
        backend: AttentionBackend,
        parallel: ParallelGroups | None = None,
        max_position: int | None = None,
    ) -> None:
        if arch.mlp_bias:
            raise ModelFileError(f"{arch.name}: biases of the feed-forward products are not supported")
        parallel = parallel or ParallelGroups()
        self.arch = arch
        self._parallel = parallel
        self._vocabulary = Vocabulary(
            ops,
            arch.vocab_size,
            arch.hidden_size,
            tied=arch.tie_embeddings,
            scale=arch.embedding_scale,
            softcap=arch.final_softcap,
            has_embedding=parallel.is_first_stage,
            has_head=parallel.is_last_stage,
        )
        self._layer_range = parallel.layer_range(arch.num_layers)
        self._layers = {i: self.layer_class(arch, i, ops, backend, parallel) for i in self._layer_range}
        self._final_norm = RMSNorm(ops, "final_norm", arch.hidden_size, arch.norm_eps)
        local_rope = arch.local_rope or arch.rope
        tables = {rope: make_rope_table(rope, max_position or arch.max_position) for rope in {arch.rope, local_rope}}
        self._ropes = [tables[arch.rope if kind == "full" else local_rope] for kind in arch.layer_kinds]

    def weight_map(self, kind: SourceKind) -> WeightMap:
        """Where this family's tensors lie in a kind of checkpoint."""
        if kind == "gguf":
            return GGUF_MAP
        ignore = (*HF_MAP.ignore, HF_TIED_HEAD) if self.arch.tie_embeddings else HF_MAP.ignore
        return replace(HF_MAP, ignore=ignore, norm_offset=self.arch.norm_offset)

    def load(self, weights: WeightReader) -> None:
        """Take every weight of this stage; `WeightReader.finish` then checks that nothing is left.

        Raises:
            ModelFileError: a tensor is missing or does not fit.
        """
        self._vocabulary.load(weights)
        for layer in self._layers.values():
            layer.load(weights)
        if self._parallel.is_last_stage:
            self._final_norm.load(weights)
        if self._parallel.pp.size > 1:
            weights.skip(self._slots_of_other_stages(weights.weight_map))

    def _slots_of_other_stages(self, weight_map: WeightMap) -> list[str]:
        slots = []
        for slot in weight_map.places:
            if slot.startswith("layers."):
                others = (i for i in range(self.arch.num_layers) if i not in self._layer_range)
                slots += [f"layers.{i}.{slot.removeprefix('layers.')}" for i in others]
            else:
                slots.append(slot)
        return slots

    def layer_facts(self) -> list[LayerFacts]:
        """What each layer of this stage keeps of the past, in order."""
        return [layer.attention.facts for layer in self._layers.values()]

    def forward(
        self, ids: torch.Tensor, ctx: ForwardContext, intermediate: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        """Run this stage on the step's tokens.

        Args:
            ids: int32 ``[T]``; read by the first stage only.
            intermediate: what the stage before returned; ``None`` on the first stage.

        Returns:
            Normalised hidden states ``[T, H]`` on the last stage, `IntermediateTensors` on the others.
        """
        residual: torch.Tensor | None = None
        if intermediate is None:
            assert self._parallel.is_first_stage
            x = self._vocabulary.embed(ids)
        else:
            x, residual = intermediate
        for i, layer in self._layers.items():
            x, residual = layer.forward(x, residual, ctx, self._ropes[i])
            ctx.progress.advance()
        if not self._parallel.is_last_stage:
            return IntermediateTensors(x, residual)
        if residual is None:
            return self._final_norm.forward(x)
        return self._final_norm.add_forward(x, residual)[0]

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[R, V]`` of hidden rows ``[R, H]``; last stage only."""
        return self._vocabulary.logits(hidden_rows)
