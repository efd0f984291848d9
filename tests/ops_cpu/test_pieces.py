"""PyTorch calls between native ops: pieces that give the bits of an eager forward, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from headrace.device.attention.metadata import ForwardContext
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.runner.graphs import BatchDescriptor, GraphMode, dispatch
from tests.ops_cpu.conftest import make_ops
from tests.ops_cpu.test_plan import BLOCK, HEADS, LAYERS, MAX_BLOCKS, WIDTH, Steps, TinyModel, make_runner, run_step

LIBRARY = torch.library.Library("headrace_tests", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

Between = Callable[["Mixed", torch.Tensor, ForwardContext], torch.Tensor]


class Mixed(TinyModel):
    """A decoder that calls PyTorch in each layer."""

    def __init__(self, ops: NativeOps, between: Between) -> None:
        super().__init__(ops)
        self.places = torch.rand(MAX_BLOCKS * BLOCK, WIDTH, generator=torch.Generator().manual_seed(7))
        self._between = between

    def between(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self._between(self, x, ctx)


REPEATABLE: dict[str, tuple[str, Between]] = {
    "one call": ("aten::tanh", lambda model, x, ctx: torch.tanh(x)),
    "scalars": ("aten::clamp", lambda model, x, ctx: x.clamp(-0.5, 0.5)),
    "calls in a row": ("aten::sigmoid", lambda model, x, ctx: x * torch.sigmoid(x)),
    "a native op reads what a call has read": ("aten::tanh", lambda model, x, ctx: model.ops.add(torch.tanh(x), x)),
    "columns": ("aten::cat", lambda model, x, ctx: torch.cat([x[:, 40:].neg(), x[:, :40]], dim=1)),
    "heads": ("aten::softmax", lambda model, x, ctx: x.view(len(x), HEADS, -1).softmax(-1).view(len(x), -1)),
    "a view that copies": ("aten::flatten", lambda model, x, ctx: x.view(len(x), HEADS, -1).transpose(1, 2).flatten(1)),
    "weights": ("aten::mul", lambda model, x, ctx: x * model.norm),
    "a constant made anew": ("aten::mul", lambda model, x, ctx: x * torch.from_numpy(np.float32([0.5]))),
    "positions": ("aten::embedding", lambda model, x, ctx: x + functional.embedding(ctx.positions, model.places)),
    "other numbers": ("aten::to", lambda model, x, ctx: x.half().float()),
    "several results": ("aten::max", lambda model, x, ctx: x - x.max(1, keepdim=True).values),
    "along the tokens": ("aten::cumsum", lambda model, x, ctx: x.cumsum(0) * 0.1),
}
REFUSED: dict[str, tuple[str, Between]] = {
    "no argument": ("aten::arange", lambda model, x, ctx: x + torch.arange(len(x))[:, None]),
    "shape by value": ("aten::nonzero depends on the values", lambda model, x, ctx: x + x.nonzero().shape[0]),
    "a new constant": ("aten::detach_ writes in place", lambda model, x, ctx: x * torch.tensor(0.5)),
    "a value": ("aten::max", lambda model, x, ctx: x * float(x.max())),
    "not of PyTorch": (
        "headrace_tests::twice is neither a native operator",
        lambda model, x, ctx: torch.ops.headrace_tests.twice(x),
    ),
    "in place": ("aten::mul_.Tensor writes in place", lambda model, x, ctx: x.mul_(2)),
    "a number of tokens": ("aten::div.Tensor depends on the size", lambda model, x, ctx: x / len(x)),
    "a number of requests": (
        "aten::div.Tensor depends on the size",
        lambda model, x, ctx: x / ctx.groups[0].num_reqs,
    ),
    "rows of a constant": ("aten::mul.Tensor depends on the size", lambda model, x, ctx: x * model.places[: len(x)]),
    "columns by number of tokens": ("depends on the size", lambda model, x, ctx: x + x[:, len(x) % 7 :][:, :1]),
    "other rows": (
        "aten::cumsum takes a tensor without one row per token",
        lambda model, x, ctx: x.view(-1, WIDTH // 2).cumsum(0).view(-1, WIDTH),
    ),
    "requests": ("aten::add", lambda model, x, ctx: x + (ctx.groups[0].seq_lens + 1)[0]),
    "a transpose": ("aten::tanh", lambda model, x, ctx: torch.tanh(x.t()).t()),
    "the last token": ("aten::tanh", lambda model, x, ctx: x + torch.tanh(x[-1:])),
    "some sizes alone": ("is called at some step sizes alone", lambda model, x, ctx: x if len(x) % 2 else x.tanh()),
}


@pytest.mark.parametrize("case", REPEATABLE)
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_pieces_equal_eager(case, activations) -> None:
    name, between = REPEATABLE[case]
    ops = make_ops(2, activations)
    model, steps = Mixed(ops, between), Steps()
    eager_caches, plan_caches = steps.caches(), steps.caches()
    runner = make_runner(model, ops, steps, plan_caches)
    (graph,) = runner.captured.graphs
    assert graph.mode is GraphMode.PIECEWISE
    assert name in graph.reason
    assert sum(op.startswith("aten::") for op in runner.op_names) >= LAYERS
    for _ in range(12):
        ids, ctx = steps.fill(eager_caches)
        choice = dispatch(BatchDescriptor(len(ids), ctx.groups[0].num_reqs), runner.captured)
        assert (choice.mode, choice.reason) == (GraphMode.PIECEWISE, graph.reason)
        want = model.forward(ids, ctx).clone()
        got = run_step(runner, ids, replace(ctx, caches=plan_caches), choice)
        assert torch.equal(got, want)
        for a, b in zip(eager_caches, plan_caches, strict=True):
            assert torch.equal(a.key, b.key)
            assert torch.equal(a.value, b.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_piece_can_hold_is_refused_by_name(case) -> None:
    why, between = REFUSED[case]
    ops, steps = make_ops(), Steps()
    model, caches = Mixed(ops, between), steps.caches()
    runner = make_runner(model, ops, steps, caches)
    assert runner.captured.graphs == ()
    assert why in runner.captured.why_none
    assert runner.op_names == []
    ids, ctx = steps.fill(caches)
    choice = dispatch(BatchDescriptor(len(ids), ctx.groups[0].num_reqs), runner.captured)
    assert (choice.mode, choice.reason) == (GraphMode.EAGER, runner.captured.why_none)
    got = run_step(runner, ids, ctx, choice).clone()
    assert torch.equal(got, model.forward(ids, ctx))


def test_a_call_behind_the_last_native_op_leaves_the_hidden_states() -> None:
    class Scaled(TinyModel):
        def forward(self, ids: torch.Tensor, ctx: ForwardContext, intermediate: None = None) -> torch.Tensor:
            return super().forward(ids, ctx) * 2

    ops, steps = make_ops(), Steps()
    model, caches = Scaled(ops), steps.caches()
    runner = make_runner(model, ops, steps, caches)
    ids, ctx = steps.fill(caches)
    assert torch.equal(run_step(runner, ids, ctx).clone(), model.forward(ids, ctx))
    before = steps.progress.read()
    hidden = run_step(runner, ids, ctx)
    assert steps.progress.read() - before == len(runner.op_names)
    logits = model.compute_logits(ops.gather_rows(hidden, torch.tensor([0], dtype=torch.int32))).numpy()
    assert (runner.run_head(hidden, [0], 0).logits == logits).all()
    ops.set_progress(None)
