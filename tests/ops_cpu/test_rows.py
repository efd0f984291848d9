"""Operators that work row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.device.ops.reference.ops import ReferenceOps
from tests.ops_cpu.cases import make_raw, make_rows
from tests.ops_cpu.conftest import all_teams, make_ops


@pytest.mark.parametrize("width", [576, 64, 24, 7, 1])
def test_rms_norm(width, reference: ReferenceOps) -> None:
    rng = np.random.default_rng(width)
    x, residual, weight = make_rows(19, width, rng), make_rows(19, width, rng), make_rows(1, width, rng)[0]
    want = reference.rms_norm(x, weight, 1e-5)
    want_sum, want_residual = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    first = None
    for ops in all_teams():
        normed = ops.rms_norm(x, weight, 1e-5)
        summed, out = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        torch.testing.assert_close(normed, want, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(summed, want_sum, rtol=2e-6, atol=2e-6)
        assert torch.equal(out, want_residual)
        assert torch.equal(ops.rms_norm(x[5:6].contiguous(), weight, 1e-5), normed[5:6])
        assert torch.equal(ops.add(x.clone(), residual), x + residual)
        first = first or (normed.clone(), summed.clone())
        assert torch.equal(normed, first[0])
        assert torch.equal(summed, first[1])


def test_gather_and_arg_max() -> None:
    rng = np.random.default_rng(0)
    x = make_rows(30, 1001, rng)
    x[4, 900] = x[4, 17] = x.max() + 1
    rows = torch.tensor([4, 29, 0, 4], dtype=torch.int32)
    for ops in all_teams():
        got = ops.gather_rows(x, rows)
        assert torch.equal(got, x[rows.long()])
        best = ops.arg_max(got)
        assert best[0] == 17, "ties go to the lower column"
        assert torch.equal(best.long(), torch.from_numpy(got.numpy().argmax(axis=1)))


@pytest.mark.parametrize("format_name", ["F32", "Q4_1"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_mixture_of_experts(format_name, renormalize, reference: ReferenceOps) -> None:
    rng = np.random.default_rng(1)
    experts, width, inner, top_k = 6, 64, 96, 2
    router = make_raw("F32", experts, width, rng)
    gates = [[make_raw(format_name, inner, width, rng) for _ in range(2)] for _ in range(experts)]
    downs = [make_raw(format_name, width, inner, rng) for _ in range(experts)]
    x = make_rows(50, width, rng)

    def run(ops, rows):
        packed = [ops.pack_weight(pair, "gate_up") for pair in gates], [ops.pack_weight([d], "linear") for d in downs]
        return ops.moe(rows, ops.pack_weight([router], "linear"), *packed, top_k, "silu", renormalize).clone()

    want = run(reference, x)
    for activations, tolerance in (("exact", 5e-6), ("int8", 5e-6 if format_name == "F32" else 5e-2)):
        results = [run(ops, x) for ops in all_teams(activations)]
        assert all(torch.equal(result, results[0]) for result in results)
        assert (results[0] - want).abs().max() <= tolerance * want.abs().max()
        ops = make_ops(2, activations)
        alone = torch.cat([run(ops, row[None]) for row in x[:12]])
        assert torch.equal(alone, results[0][:12])
