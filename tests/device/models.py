"""Tiny random models in every file format, and a runner that drives a loaded model without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.config.sections import (
    CacheSection,
    DeviceSection,
    EngineConfig,
    ModelSection,
    ObservabilitySection,
    ParallelSection,
    SchedulerSection,
)
from headrace.device.attention.metadata import AttentionMetadata, ForwardContext, LayerCache
from headrace.device.loading.loader import load_model
from headrace.device.models.decoder import Decoder
from headrace.device.ops.interface import Ops
from headrace.device.ops.reference.ops import ReferenceOps
from headrace.model_files.architecture import read_architecture

BLOCK_SIZE = 4


def make_config(path: Path, max_model_len: int = 128, backend: str | None = None) -> EngineConfig:
    """A resolved configuration for the reference operators."""
    return EngineConfig(
        model=ModelSection(model=str(path), dtype="float32", max_model_len=max_model_len),
        cache=CacheSection(block_size=BLOCK_SIZE, kv_cache_dtype="float32"),
        scheduler=SchedulerSection(),
        parallel=ParallelSection(),
        device=DeviceSection(platform="cpu", ops="reference", attention_backend=backend),
        observability=ObservabilitySection(),
        architecture=read_architecture(path),
        model_path=str(path),
    )


@dataclass
class Request:
    """Tokens of one request and the blocks that it has."""

    ids: list[int]
    blocks: list[int]
    computed: int = 0


class Driver:
    """Runs steps of any mix of requests; blocks are handed out in a scrambled order."""

    def __init__(self, model: Decoder, caches: list[LayerCache]) -> None:
        self.model = model
        self.caches = caches
        generator = torch.Generator().manual_seed(0)
        self._free = (torch.randperm(len(caches[0].key) - 1, generator=generator) + 1).tolist()

    @classmethod
    def load(cls, path: Path, max_model_len: int = 128, num_blocks: int = 256, ops: Ops | None = None) -> Driver:
        """Load through the real loader."""
        loaded = load_model(make_config(path, max_model_len), ops or ReferenceOps())
        backend = loaded.attention.backend
        specs = [backend.make_spec(facts, BLOCK_SIZE, "float32") for facts in loaded.model.layer_facts()]
        return cls(loaded.model, [backend.allocate(spec, num_blocks) for spec in specs])

    def add(self, ids: list[int]) -> Request:
        """A request with room for its tokens."""
        count = -(-len(ids) // BLOCK_SIZE)
        return Request(ids, [self._free.pop() for _ in range(count)])

    def context(self, step: list[tuple[Request, int]]) -> tuple[torch.Tensor, ForwardContext]:
        """Ids and context of a step that computes the given number of further tokens of each request."""
        ids, positions, slots, starts, lens = [], [], [], [0], []
        for request, count in step:
            for position in range(request.computed, request.computed + count):
                ids.append(request.ids[position])
                positions.append(position)
                slots.append(request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            request.computed += count
            starts.append(len(ids))
            lens.append(request.computed)
        table = torch.zeros(len(step), max(len(r.blocks) for r, _ in step), dtype=torch.int32)
        for i, (request, _) in enumerate(step):
            table[i, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        meta = AttentionMetadata(
            num_tokens=len(ids),
            num_reqs=len(step),
            max_query_len=max(count for _, count in step),
            max_seq_len=max(lens),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )
        num_layers = self.model.arch.num_layers
        ctx = ForwardContext(torch.tensor(positions, dtype=torch.int32), [meta], [0] * num_layers, self.caches)
        return torch.tensor(ids, dtype=torch.int32), ctx

    @torch.inference_mode()
    def step(self, *step: tuple[Request, int]) -> torch.Tensor:
        """Logits of every token of the step."""
        hidden = self.model.forward(*self.context(list(step)))
        assert isinstance(hidden, torch.Tensor)
        return self.model.compute_logits(hidden)

    def run(self, ids: list[int], chunks: list[int] | None = None) -> torch.Tensor:
        """Logits of all tokens of one request, computed in chunks."""
        request = self.add(ids)
        return torch.cat([self.step((request, count)) for count in chunks or [len(ids)]])
