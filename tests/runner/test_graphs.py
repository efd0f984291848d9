"""Dispatch as a pure function, and block memory shared between groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.device.runner.graphs import (
    BatchDescriptor,
    CapturedGraph,
    CapturedGraphs,
    GraphMode,
    dispatch,
    summarize,
)
from headrace.device.runner.kv_memory import KVMemory
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import GraphSummary

FULL, PIECEWISE, EAGER = GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.EAGER
PLAN = CapturedGraphs((CapturedGraph(FULL, 512, 64),))
CUDA = CapturedGraphs(
    (
        CapturedGraph(FULL, 8, 8, uniform_query_len=1, pads=True),
        CapturedGraph(FULL, 16, 16, uniform_query_len=1, pads=True),
        CapturedGraph(PIECEWISE, 64, 64, pads=True),
    )
)


@pytest.mark.parametrize(
    ("shape", "captured", "mode", "size", "reason"),
    [
        (BatchDescriptor(5, 5, 1), CapturedGraphs(), EAGER, 5, "no graph was captured"),
        (BatchDescriptor(5, 5, 1), CapturedGraphs(why_none="--enforce-eager"), EAGER, 5, "--enforce-eager"),
        (BatchDescriptor(500, 5), PLAN, FULL, 500, "fits"),
        (BatchDescriptor(513, 5), PLAN, EAGER, 513, "513 tokens exceed 512"),
        (BatchDescriptor(70, 65), PLAN, EAGER, 70, "65 requests exceed 64"),
        (BatchDescriptor(5, 5, 1, has_lora=True), PLAN, EAGER, 5, "adapters are in use"),
        (BatchDescriptor(5, 5, 1), CUDA, FULL, 8, "fits"),
        (BatchDescriptor(9, 9, 1), CUDA, FULL, 16, "fits"),
        (BatchDescriptor(9, 3), CUDA, PIECEWISE, 64, "query lengths are not all 1"),
        (BatchDescriptor(65, 3), CUDA, EAGER, 65, "65 tokens exceed 64"),
    ],
)
def test_dispatch(shape: BatchDescriptor, captured: CapturedGraphs, mode: GraphMode, size: int, reason: str) -> None:
    choice = dispatch(shape, captured)
    assert (choice.mode, choice.num_tokens) == (mode, size)
    assert reason in choice.reason
    assert (choice.graph is None) == (mode is EAGER)


PIECES = CapturedGraphs((CapturedGraph(PIECEWISE, 512, 64, reason="aten::tanh runs between native operators"),))


def test_pieces_say_why() -> None:
    choice = dispatch(BatchDescriptor(5, 5), PIECES)
    assert (choice.mode, choice.num_tokens) == (PIECEWISE, 5)
    assert choice.reason == "aten::tanh runs between native operators"


@pytest.mark.parametrize(
    ("captured", "mode", "reason", "sizes"),
    [
        (CapturedGraphs(why_none="--enforce-eager"), "EAGER", "--enforce-eager", []),
        (PLAN, "FULL", "the whole forward was captured", [(512, 64)]),
        (PIECES, "PIECEWISE", "aten::tanh runs between native operators", [(512, 64)]),
        (CUDA, "FULL", "the whole forward was captured", [(8, 8), (16, 16), (64, 64)]),
    ],
)
def test_summary(captured: CapturedGraphs, mode: str, reason: str, sizes: list[tuple[int, int]]) -> None:
    assert summarize(captured) == GraphSummary(mode=mode, reason=reason, sizes=sizes)


def test_every_layer_has_its_blocks(kv_config: Callable[..., KVCacheConfig], kv_backend: Any) -> None:
    memory = KVMemory(kv_config(groups=2, num_blocks=10), kv_backend)
    assert memory.layer_groups == [0, 1, 0, 1]
    assert len({cache.key.data_ptr() for cache in memory.caches}) == 4
    assert memory.num_bytes == 4 * 10 * 4 * 2 * 4
