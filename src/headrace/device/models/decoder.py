"""The decoder that every family here shares; a family says where norms stand and how its tensors are named.

Owns the layers of this pipeline stage and the way of the hidden states through them. Between layers the residual stream
is kept apart from the last sub-layer's output, so that the sum and the next norm are one operator. The forward consists
of `Ops` methods and views alone, which is what lets a captured plan hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from headrace.base.errors import ModelFileError
from headrace.config.architecture import Architecture
from headrace.device.attention.backend import AttentionBackend, LayerFacts
from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import IntermediateTensors, ParallelGroups
from headrace.device.layers.attention import Attention
from headrace.device.layers.embedding import Vocabulary
from headrace.device.layers.mlp import GatedMLP
from headrace.device.layers.norm import RMSNorm
from headrace.device.layers.rope import make_rope_table
from headrace.device.loading.name_maps import GGUF_MAP, HF_MAP, HF_TIED_HEAD, SourceKind
from headrace.device.loading.weights import WeightMap, WeightReader
from headrace.device.ops.interface import Ops

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""The last sub-layer's output and the residual that it must still be added to, if any."""


class DecoderLayer(Protocol):
    """Attention and MLP with norms around them."""

    def load(self, weights: WeightReader) -> None:
        """Take the layer's weights."""
        ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        """Run the layer on ``[T, H]``."""
        ...


class _LayerParts:
    """What all layers have; `norms` names the norm slots that the placement needs."""

    norms: Sequence[str] = ()

    def __init__(
        self, arch: Architecture, layer: int, ops: Ops, backend: AttentionBackend, parallel: ParallelGroups
    ) -> None:
        prefix = f"layers.{layer}"
        self._ops = ops
        self.attention = Attention(arch, layer, ops, backend, parallel.tp)
        self.mlp = GatedMLP(ops, prefix, arch.hidden_size, arch.intermediate_size, arch.activation, parallel.tp)
        self.norm = {n: RMSNorm(ops, f"{prefix}.{n}", arch.hidden_size, arch.norm_eps) for n in self.norms}

    def load(self, weights: WeightReader) -> None:
        """Take the layer's weights."""
        self.attention.load(weights)
        self.mlp.load(weights)
        for norm in self.norm.values():
            norm.load(weights)

    def _enter(self, x: torch.Tensor, residual: torch.Tensor | None, norm: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what is outstanding and normalise."""
        if residual is None:
            return self.norm[norm].forward(x), x
        return self.norm[norm].add_forward(x, residual)


class PreNormLayer(_LayerParts):
    """A norm before each half."""

    norms = ("input_norm", "mlp_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        x, residual = self._enter(x, residual, "input_norm")
        x = self.attention.forward(x, ctx, cos_sin)
        x, residual = self.norm["mlp_norm"].add_forward(x, residual)
        return self.mlp.forward(x), residual


class SandwichNormLayer(_LayerParts):
    """A norm before and after each half."""

    norms = ("input_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        x, residual = self._enter(x, residual, "input_norm")
        x = self.norm["post_attn_norm"].forward(self.attention.forward(x, ctx, cos_sin))
        x, residual = self.norm["mlp_norm"].add_forward(x, residual)
        return self.norm["post_mlp_norm"].forward(self.mlp.forward(x)), residual


class PostNormLayer(_LayerParts):
    """A norm after each half, before it is added."""

    norms = ("post_attn_norm", "post_mlp_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: ForwardContext, cos_sin: torch.Tensor
    ) -> Stream:
        assert residual is None
        x = self._ops.add(x, self.norm["post_attn_norm"].forward(self.attention.forward(x, ctx, cos_sin)))
        return self._ops.add(x, self.norm["post_mlp_norm"].forward(self.mlp.forward(x))), None


class Decoder:
    """A causal language model, or the part of it that this pipeline stage holds.

    Args:
        max_position: the longest sequence served; rotary tables reach this far.
    """

    layer_class: type[PreNormLayer | SandwichNormLayer | PostNormLayer] = PreNormLayer

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
