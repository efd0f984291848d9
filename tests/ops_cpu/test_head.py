"""The head with its arg max: what logits and a look through them give, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.device.ops.cpu import _native
from headrace.device.quantization.raw_tensor import make_raw_float
from tests.ops_cpu.conftest import all_teams

VOCAB, WIDTH = 1000, 64


@pytest.mark.parametrize("rows", [1, 3, 40, 200])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_ties_values_that_are_not_finite_and_rows_that_keep_their_logits(rows, softcap) -> None:
    rng = np.random.default_rng(rows)
    matrix = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    # Equal rows of the matrix give equal logits.
    matrix[rng.permutation(VOCAB)[:500]] = matrix[rng.permutation(VOCAB)[:500]]
    clean = rng.standard_normal((rows, WIDTH)).astype(np.float32)
    for ops in all_teams():
        x, kept = clean.copy(), np.zeros((rows - rows // 2, VOCAB + 7), np.float32)
        head = ops.pack_weight([make_raw_float("w", matrix)], "head")
        logits = ops.logits(torch.from_numpy(x), head, softcap).numpy()
        best, peaks = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        op = _native.head(torch.from_numpy(x), head, softcap, True, best, peaks, kept)
        ops.team.run(op, logit_rows=rows, best_rows=rows // 2)
        assert np.array_equal(best, logits.argmax(axis=1))
        assert np.array_equal(peaks, logits.max(axis=1))
        assert np.array_equal(kept[:, :VOCAB], logits[rows // 2 :])
        x[0, 5], x[rows // 2, 7] = np.nan, np.inf
        ops.team.run(op, logit_rows=rows, best_rows=rows)
        assert np.flatnonzero(~np.isfinite(peaks)).tolist() == ([0] if softcap and rows > 1 else sorted({0, rows // 2}))
        with pytest.raises(IndexError, match="does not fit"):
            ops.team.run(op, logit_rows=rows + 1, best_rows=rows)
        if rows > 1:
            with pytest.raises(IndexError, match="have room"):
                ops.team.run(op, logit_rows=rows, best_rows=0)
