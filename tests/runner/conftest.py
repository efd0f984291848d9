"""A runner over a tiny fake model whose output depends on exactly what the KV blocks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.clock import ManualClock
from headrace.base.progress import ProgressWord
from headrace.device.attention.backend import LayerFacts
from headrace.device.attention.cpu_layout import allocate_cpu_blocks, make_cpu_spec
from headrace.device.attention.metadata import ForwardContext, LayerCache
from headrace.device.ops.reference.step_inputs import NumpyStepInputs
from headrace.device.runner.graphs import EagerRunner
from headrace.device.runner.kv_memory import KVMemory
from headrace.device.runner.model_runner import ModelRunner, RunnerLimits
from headrace.device.sampling.kernels import NumpySampling
from headrace.messages.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec

VOCAB = 97
BLOCK = 4


def fake_logits(history: list[int]) -> np.ndarray:
    """Logits after a history, in plain Python."""
    h = 7
    for token in history:
        h = (h * 31 + token + 1) % 65_521
    return ((np.arange(1, VOCAB + 1) * (h + 1) * 7919) % 1009).astype(np.float32) / 50


class FakeModel:
    """Stores each token id in its slot in every layer, then reads the whole history back through the block table."""

    def __init__(self) -> None:
        self.poison: set[int] = set()
        self.num_forwards = 0

    def forward(self, ids: torch.Tensor, ctx: ForwardContext, intermediate: Any = None) -> torch.Tensor:
        self.num_forwards += 1
        hidden = torch.zeros(len(ids), 1)
        for layer in range(len(ctx.caches)):
            meta, cache = ctx.for_layer(layer)
            slots = meta.slot_mapping[: len(ids)]
            assert (slots >= 0).all() and len(set(slots.tolist())) == len(slots)
            cache.key[slots // BLOCK, 0, 0, slots % BLOCK] = ids.float()
            for i in range(meta.num_reqs):
                start, stop = meta.query_start_loc[i : i + 2].tolist()
                length = int(meta.seq_lens[i])
                blocks = meta.block_table[i].long()
                tokens = cache.key[blocks, 0, 0].reshape(-1)[:length].long().tolist()
                h = 7
                for position, token in enumerate(tokens):
                    h = (h * 31 + token + 1) % 65_521
                    row = position - (length - (stop - start)) + start
                    if row >= start:
                        assert int(ctx.positions[row]) == position and int(ids[row]) == token
                        assert layer == 0 or float(hidden[row]) == h
                        hidden[row] = h
        return hidden

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        h = hidden_rows[:, :1].long()
        logits = ((torch.arange(1, VOCAB + 1) * (h + 1) * 7919) % 1009).float() / 50
        for i in range(len(h)):
            if int(h[i]) in self.poison:
                logits[i, 3] = float("nan")
        return logits


class FakeOps:
    """The operators that the runner itself calls."""

    sampling = NumpySampling()
    make_step_inputs = staticmethod(NumpyStepInputs)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows.long()]


class FakeBackend:
    """Allocation in the CPU layout."""

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> LayerCache:
        return allocate_cpu_blocks(spec, num_blocks)


def make_config(num_blocks: int = 200, groups: int = 1) -> KVCacheConfig:
    spec = make_cpu_spec(LayerFacts(num_kv_heads=1, head_dim=1), BLOCK, "float32")
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        groups=tuple(KVCacheGroup((g, g + groups), spec) for g in range(groups)),
    )


def _make_runner(
    max_num_seqs: int = 8,
    max_tokens: int = 64,
    max_model_len: int = 60,
    groups: int = 1,
    hooks: Any = None,
    clock: Any = None,
) -> ModelRunner:
    config = make_config(groups=groups)
    model, ops = FakeModel(), FakeOps()
    return ModelRunner(
        model,
        ops,  # type: ignore[arg-type]
        EagerRunner(model, ops),  # type: ignore[arg-type]
        config,
        KVMemory(config, FakeBackend()),  # type: ignore[arg-type]
        RunnerLimits(max_num_seqs, max_tokens, max_model_len, VOCAB),
        clock or ManualClock(),
        ProgressWord(),
        hooks,
    )


@pytest.fixture
def make_runner() -> Callable[..., ModelRunner]:
    return _make_runner


@pytest.fixture
def logits_after() -> Callable[[list[int]], np.ndarray]:
    return fake_logits


@pytest.fixture
def kv_config() -> Callable[..., KVCacheConfig]:
    return make_config


@pytest.fixture
def kv_backend() -> FakeBackend:
    return FakeBackend()
