"""The captured plan: the same bits as eager calls for any step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.base.progress import ProgressWord
from headrace.device.attention.metadata import AttentionMetadata, ForwardContext, LayerCache
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.ops.cpu.plan_runner import PlanRunner
from headrace.device.ops.cpu.recorder import Recorder
from headrace.device.runner.graphs import Dispatch, ForwardInputs, ForwardModel, GraphMode, HeadRows, run_head_eagerly
from tests.ops_cpu.cases import Shape, make_raw
from tests.ops_cpu.conftest import make_ops

WIDTH, INNER, HEADS, KV_HEADS, DIM, BLOCK, LAYERS, VOCAB = 96, 160, 6, 2, 16, 16, 3, 350
MAX_TOKENS, MAX_REQS, MAX_BLOCKS = 150, 9, 20


class TinyModel:
    """A decoder of `Ops` calls alone."""

    def __init__(self, ops: NativeOps, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        qkv = (HEADS + 2 * KV_HEADS) * DIM

        def pack(rows: int, cols: int, role: str = "linear", parts: int = 1) -> object:
            return ops.pack_weight([make_raw("Q4_1", rows, cols, rng) for _ in range(parts)], role)

        self.ops = ops
        self.shape = Shape(HEADS, KV_HEADS, DIM, DIM**-0.5)
        self.table = pack(VOCAB, WIDTH, "head")
        self.layers = [
            (pack(qkv, WIDTH), pack(WIDTH, HEADS * DIM), pack(INNER, WIDTH, "gate_up", 2), pack(WIDTH, INNER))
            for _ in range(LAYERS)
        ]
        generator = torch.Generator().manual_seed(seed)
        self.norm = torch.rand(WIDTH, generator=generator)
        angles = torch.rand(MAX_BLOCKS * BLOCK, DIM // 2, generator=generator) * 6
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()

    def forward(self, ids: torch.Tensor, ctx: ForwardContext, intermediate: None = None) -> torch.Tensor:
        ops, residual = self.ops, None
        x = ops.embedding(ids, self.table)
        for layer, (qkv, out, gate_up, down) in enumerate(self.layers):
            meta, cache = ctx.for_layer(layer)
            if residual is None:
                x, residual = ops.rms_norm(x, self.norm, 1e-5), x
            else:
                x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            q = ops.rotate_and_store(ops.linear(x, qkv), ctx.positions, self.cos_sin, self.shape, meta, cache)
            x = ops.linear(ops.attention(q, self.shape, meta, cache), out)
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            x = self.between(x, ctx)
            x = ops.linear(ops.gated_linear(x, gate_up, "silu"), down)
        return ops.add_rms_norm(x, residual, self.norm, 1e-5)[0]

    def between(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """What a layer does between its native ops."""
        return x

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return self.ops.logits(hidden_rows, self.table)


class Steps:
    """Persistent inputs, filled with random steps."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.slots = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self.starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32)
        self.lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        order = self.rng.permutation(MAX_REQS * MAX_BLOCKS).astype(np.int32) + 1
        self.table = torch.from_numpy(order.reshape(MAX_REQS, MAX_BLOCKS))
        self.progress = ProgressWord()

    def caches(self) -> list[LayerCache]:
        rng = torch.Generator().manual_seed(1)
        blocks = 1 + MAX_REQS * MAX_BLOCKS
        return [
            LayerCache(
                torch.randn(blocks, KV_HEADS, DIM, BLOCK, generator=rng).half(),
                torch.randn(blocks, KV_HEADS, BLOCK, DIM, generator=rng).half(),
            )
            for _ in range(LAYERS)
        ]

    def whole(self, caches: list[LayerCache]) -> tuple[torch.Tensor, ForwardContext]:
        """All of the buffers over ``caches``."""
        tables = (self.starts, self.lens, self.table, self.slots)
        meta = AttentionMetadata(MAX_TOKENS, MAX_REQS, MAX_TOKENS, MAX_TOKENS, *tables)
        return self.ids, ForwardContext(self.positions, [meta], [0] * LAYERS, caches, self.progress)

    def fill(self, caches: list[LayerCache]) -> tuple[torch.Tensor, ForwardContext]:
        """A random step over ``caches``."""
        reqs = int(self.rng.integers(1, MAX_REQS + 1))
        # A few rows that all threads share, or so many that each takes its own.
        new = np.minimum(self.rng.geometric(self.rng.choice([0.5, 0.1, 0.02]), reqs), MAX_TOKENS // reqs)
        old = self.rng.integers(0, MAX_BLOCKS * BLOCK - int(new.max()), reqs)
        self.starts[: reqs + 1] = torch.from_numpy(np.concatenate([[0], np.cumsum(new)]).astype(np.int32))
        self.lens[:reqs] = torch.from_numpy((old + new).astype(np.int32))
        tokens = int(new.sum())
        positions = np.concatenate([np.arange(o, o + n) for o, n in zip(old, new, strict=True)])
        owner = np.repeat(np.arange(reqs), new)
        self.positions[:tokens] = torch.from_numpy(positions.astype(np.int32))
        blocks = self.table.numpy()[owner, positions // BLOCK].astype(np.int64)
        self.slots[:tokens] = torch.from_numpy(blocks * BLOCK + positions % BLOCK)
        self.ids[:tokens] = torch.from_numpy(self.rng.integers(0, VOCAB, tokens).astype(np.int32))
        meta = AttentionMetadata(
            num_tokens=tokens,
            num_reqs=reqs,
            max_query_len=int(new.max()),
            max_seq_len=int((old + new).max()),
            query_start_loc=self.starts[: reqs + 1],
            seq_lens=self.lens[:reqs],
            block_table=self.table[:reqs],
            slot_mapping=self.slots[:tokens],
        )
        return self.ids[:tokens], ForwardContext(self.positions[:tokens], [meta], [0] * LAYERS, caches, self.progress)


def run_step(
    runner: PlanRunner, ids: torch.Tensor, ctx: ForwardContext, choice: Dispatch | None = None
) -> torch.Tensor:
    inputs = ForwardInputs(len(ids), ctx.groups[0].num_reqs, lambda: (ids, ctx))
    hidden = runner.run(choice or Dispatch(GraphMode.FULL, "test", len(ids)), inputs, None)
    assert isinstance(hidden, torch.Tensor)
    return hidden


def make_runner(model: ForwardModel, ops: NativeOps, steps: Steps, caches: list[LayerCache]) -> PlanRunner:
    runner = PlanRunner(model, ops)
    runner.capture(*steps.whole(caches))
    return runner


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_replay_equals_eager(activations, threads) -> None:
    ops = make_ops(threads, activations)
    model, steps = TinyModel(ops), Steps()
    eager_caches, plan_caches = steps.caches(), steps.caches()
    runner = make_runner(model, ops, steps, plan_caches)
    for _ in range(30):
        ids, ctx = steps.fill(eager_caches)
        want = model.forward(ids, ctx).clone()
        got = run_step(runner, ids, replace(ctx, caches=plan_caches))
        assert torch.equal(got, want)
        for a, b in zip(eager_caches, plan_caches, strict=True):
            assert torch.equal(a.key, b.key)
            assert torch.equal(a.value, b.value)
    norms = 0 if activations == "int8" else 2 * LAYERS
    assert sum("norm" in name for name in runner.op_names) == norms + 1, "norms are fused into integer products"


def test_teams_of_any_size_replay_the_same_bits() -> None:
    results = []
    for threads in (1, 2, 3):
        ops, steps = make_ops(threads), Steps(3)
        caches = steps.caches()
        runner = make_runner(TinyModel(ops), ops, steps, caches)
        results.append([])
        for _ in range(5):
            ids, ctx = steps.fill(caches)
            results[-1].append(run_step(runner, ids, ctx).clone())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_progress_moves_with_every_op() -> None:
    ops, steps = make_ops(), Steps()
    caches = steps.caches()
    runner = make_runner(TinyModel(ops), ops, steps, caches)
    for _ in range(20):
        ids, ctx = steps.fill(caches)
        before = steps.progress.read()
        run_step(runner, ids, ctx)
        assert steps.progress.read() - before == len(runner.op_names)
    ops.set_progress(None)


def test_only_results_of_equal_width_share_a_buffer() -> None:
    # Threads with rows of their own are at different ops: a row must have one place in a buffer.
    recorder = Recorder(MAX_TOKENS, MAX_REQS, 0)
    first = recorder.take(MAX_TOKENS, 1000, None)
    address = first.data_ptr()
    del first
    other, same = recorder.take(MAX_TOKENS, 1024, None), recorder.take(MAX_TOKENS, 1000, None)
    assert other.data_ptr() != address
    assert same.data_ptr() == address


def test_steps_that_do_not_fit_are_errors() -> None:
    ops, steps = make_ops(), Steps()
    caches = steps.caches()
    runner = make_runner(TinyModel(ops), ops, steps, caches)
    ids, ctx = steps.fill(caches)
    want = run_step(runner, ids, ctx).clone()
    before = [cache.key.clone() for cache in caches]
    good = int(ids[0])
    ids[0] = VOCAB
    with pytest.raises(IndexError, match="token id"):
        run_step(runner, ids, ctx)
    assert all(torch.equal(a, cache.key) for a, cache in zip(before, caches, strict=True)), "nothing has run"
    ids[0] = good
    with pytest.raises(IndexError, match="larger than the captured plan"):
        runner._recorder.pieces[0].replay(ops.team, MAX_TOKENS + 1, 1)
    assert torch.equal(run_step(runner, ids, ctx), want)


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_planned_head_equals_logits_and_arg_max(activations, threads) -> None:
    ops = make_ops(threads, activations)
    model, steps = TinyModel(ops), Steps(4)
    caches = steps.caches()
    runner = make_runner(model, ops, steps, caches)
    for _ in range(30):
        ids, ctx = steps.fill(caches)
        hidden = run_step(runner, ids, ctx)
        rows = steps.rng.integers(0, len(ids), int(steps.rng.integers(1, MAX_REQS + 1))).tolist()
        want = run_head_eagerly(model, ops, hidden, rows)
        num_best = int(steps.rng.integers(0, len(rows) + 1))
        got = runner.run_head(hidden, rows, num_best)
        assert np.array_equal(got.best, want.best)
        assert np.array_equal(got.peaks, want.peaks)
        assert np.array_equal(got.logits, want.logits[num_best:])


def test_a_head_in_the_call_of_its_forward_equals_one_behind_it() -> None:
    ops = make_ops(2, "int8")
    model, steps = TinyModel(ops), Steps(6)
    caches = steps.caches()
    runner = make_runner(model, ops, steps, caches)
    for _ in range(20):
        ids, ctx = steps.fill(caches)
        rows = steps.rng.integers(0, len(ids), int(steps.rng.integers(1, MAX_REQS + 1))).tolist()
        num_best = int(steps.rng.integers(0, len(rows) + 1))
        want = run_head_eagerly(model, ops, run_step(runner, ids, ctx).clone(), rows)
        hint = HeadRows(rows, num_best)
        inputs = ForwardInputs(len(ids), ctx.groups[0].num_reqs, lambda made=(ids, ctx): made, hint)
        hidden = runner.run(Dispatch(GraphMode.FULL, "test", len(ids)), inputs, None)
        assert isinstance(hidden, torch.Tensor)
        before = steps.progress.read()
        got = runner.run_head(hidden, list(rows), num_best)
        assert steps.progress.read() == before, "it was there already"
        assert (got.best, got.peaks) == (want.best, want.peaks)
        assert np.array_equal(got.logits, want.logits[num_best:])
        other = runner.run_head(hidden, rows[:1], 1)
        assert (other.best, other.peaks) == (want.best[:1], want.peaks[:1])
    ops.set_progress(None)


def test_a_head_of_a_model_that_changes_its_logits_is_called_op_by_op() -> None:
    class Scaled(TinyModel):
        def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
            return super().compute_logits(hidden_rows) * 2

    ops, steps = make_ops(), Steps(5)
    model = Scaled(ops)
    caches = steps.caches()
    runner = make_runner(model, ops, steps, caches)
    ids, ctx = steps.fill(caches)
    hidden, rows = run_step(runner, ids, ctx), [0]
    want = model.compute_logits(ops.gather_rows(hidden, torch.tensor(rows, dtype=torch.int32))).numpy()
    assert np.array_equal(runner.run_head(hidden, rows, 0).logits, want)
