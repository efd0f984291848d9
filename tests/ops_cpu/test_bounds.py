"""Numbers of rows that buffers have no room for are errors at the binding, for every op."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.device.ops.cpu import _native
from tests.ops_cpu.cases import make_raw
from tests.ops_cpu.conftest import make_ops

ROWS, WIDTH, HEADS, BLOCK = 4, 64, 4, 16
DIM = WIDTH // HEADS


@pytest.fixture
def made() -> Iterator[tuple[_native.Team, dict[str, tuple[_native.Op, str]]]]:
    """A team and one op of each kind over buffers of a few rows, with what counts its rows."""
    ops, rng = make_ops(), np.random.default_rng(0)
    x, y = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    wide = torch.zeros(ROWS, 3 * WIDTH)
    ids, places = torch.zeros(ROWS, dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32)
    square = ops.pack_weight([make_raw("Q8_0", WIDTH, WIDTH, rng)], "linear")
    pair = ops.pack_weight([make_raw("Q8_0", WIDTH, WIDTH, rng) for _ in range(2)], "gate_up")
    norm, peaks = torch.ones(WIDTH), torch.zeros(ROWS)
    starts = torch.tensor([0, ROWS], dtype=torch.int32)
    lens, table = torch.tensor([ROWS], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    key, value = torch.zeros(1, HEADS, DIM, BLOCK), torch.zeros(1, HEADS, BLOCK, DIM)
    slots, cache = torch.arange(ROWS), _native.cache(key, value, None)
    step, few = _native.step(starts, lens, table, slots), _native.step(starts, lens, table, slots[1:])
    table_of_angles = torch.zeros(BLOCK, DIM)
    tokens, logits = _native.Rows.TOKENS, _native.Rows.LOGITS

    def rope(over: _native.StepView) -> _native.Op:
        return _native.rope(wide, places, table_of_angles, HEADS, over, cache, None, None, 0.0, y)

    ops_by_name = {
        "embedding": (_native.embedding(ids, square, 1.0, x), "tokens"),
        "norm": (_native.norm(x, None, norm, 1e-5, y, None, tokens), "tokens"),
        "add": (_native.add(x, y, y, tokens), "tokens"),
        "linear": (_native.linear(x, square, None, 0.0, False, y, tokens), "tokens"),
        "linear of logits": (_native.linear(x, square, None, 0.0, False, y, logits), "logit_rows"),
        "gated": (_native.gated(x, pair, "silu", False, y, tokens), "tokens"),
        "gather": (_native.gather(x, places, y), "logit_rows"),
        "arg max": (_native.arg_max(x, ids), "logit_rows"),
        "head": (_native.head(x, square, 0.0, False, ids, peaks, y), "logit_rows"),
        "rope": (rope(step), "tokens"),
        "rope with fewer slots": (rope(few), "tokens"),
        "attention": (_native.attention(x, HEADS, 1.0, 0, 0, 0.0, None, False, step, cache, y), "reqs"),
        "moe": (_native.moe(x, square, [pair] * WIDTH, [square] * WIDTH, 2, "silu", True, False, y), "tokens"),
    }
    # Ops keep addresses: a generator keeps the arrays above for as long as the test.
    yield ops.team, ops_by_name  # noqa: PT022


@pytest.mark.parametrize("rows", [-1, ROWS + 1, 1 << 30])
def test_row_counts_past_the_buffers_are_errors(rows: int, made) -> None:
    team, ops_by_name = made
    for name, (op, kind) in ops_by_name.items():
        others = {"tokens": ROWS} if name == "gather" else {}
        with pytest.raises(IndexError, match="does not fit"):
            team.run(op, **{**others, kind: rows})
        plan = _native.Plan(*(rows if kind == size else 0 for size in ("tokens", "reqs", "logit_rows")))
        plan.append(op)
        with pytest.raises(IndexError, match="does not fit"):
            plan.finish(team, [])


def test_ops_run_on_as_many_rows_as_they_have_room_for(made) -> None:
    team, ops_by_name = made
    for name, (op, kind) in ops_by_name.items():
        counts = {"tokens": ROWS, "reqs": 1} if name == "attention" else {kind: ROWS}
        if name == "gather":
            counts["tokens"] = ROWS
        if name == "rope with fewer slots":
            with pytest.raises(IndexError, match="does not fit"):
                team.run(op, **counts)
        else:
            team.run(op, **counts)
