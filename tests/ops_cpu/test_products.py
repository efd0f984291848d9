"""Products: close to the oracle, and the same bits in every tile, at every place, on every team."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from headrace.device.ops.reference.ops import ReferenceOps
from tests.ops_cpu.cases import FLOAT_FORMATS, QUANTIZED_FORMATS, make_raw, make_rows, whole_blocks
from tests.ops_cpu.conftest import all_teams, make_ops

ALL_FORMATS = FLOAT_FORMATS + QUANTIZED_FORMATS
MAX_ROWS = 130


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("format_name", ALL_FORMATS)
@pytest.mark.parametrize(("outputs", "width"), [(192, 576), (100, 96), (7, 32), (33, 1536)])
def test_close_to_the_oracle(format_name, activations, outputs, width, reference: ReferenceOps) -> None:
    rng, width = np.random.default_rng(outputs), whole_blocks(format_name, width)
    raw, x = make_raw(format_name, outputs, width, rng), make_rows(37, width, rng)
    bias = torch.from_numpy(rng.standard_normal(outputs).astype(np.float32))
    ops = make_ops(2, activations)
    got = ops.linear(x, ops.pack_weight([raw], "linear"), bias)
    want = reference.linear(x, reference.pack_weight([raw], "linear"), bias)
    # The values of Q2_K are rounded when they are packed.
    exact = format_name in FLOAT_FORMATS or (activations == "exact" and format_name != "Q2_K")
    assert (got - want).abs().max() <= (3e-6 if exact else 2e-2) * want.abs().max()


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("format_name", ALL_FORMATS)
def test_teams_agree_bit_for_bit(format_name, activations) -> None:
    rng, width = np.random.default_rng(1), whole_blocks(format_name, 160)
    raw, x = make_raw(format_name, 83, width, rng), make_rows(45, width, rng)
    results = [ops.linear(x, ops.pack_weight([raw], "linear")).clone() for ops in all_teams(activations)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("format_name", ["F32", "Q8_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"])
def test_a_row_is_the_same_in_every_batch_and_place(format_name, activations) -> None:
    rng, width = np.random.default_rng(2), whole_blocks(format_name, 96)
    raw, x = make_raw(format_name, 48, width, rng), make_rows(MAX_ROWS, width, rng)
    for ops in all_teams(activations):
        if ops.isa == "generic" and ops.team.num_threads == 1:
            continue
        weight = ops.pack_weight([raw], "linear")
        alone = torch.cat([ops.linear(row[None], weight) for row in x])
        for rows in range(1, MAX_ROWS + 1):
            # The last `rows` rows: every row stands at every place of some batch.
            assert torch.equal(ops.linear(x[-rows:].contiguous(), weight), alone[-rows:]), (ops.isa, rows)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("format_name", ["F32", "Q4_1"])
@pytest.mark.parametrize("inner", [96, 40])
def test_gated_product(format_name, activation, inner, reference: ReferenceOps) -> None:
    rng = np.random.default_rng(3)
    raws, x = [make_raw(format_name, inner, 64, rng) for _ in range(2)], make_rows(21, 64, rng)
    want = reference.gated_linear(x, reference.pack_weight(raws, "gate_up"), activation)
    for exactness in ("exact", "int8"):
        results = []
        for ops in all_teams(exactness):
            weight = ops.pack_weight(raws, "gate_up")
            results.append(ops.gated_linear(x, weight, activation).clone())
            alone = torch.cat([ops.gated_linear(row[None], weight, activation) for row in x[:5]])
            assert torch.equal(alone, results[-1][:5])
        for result in results:
            assert torch.equal(result, results[0])
        tolerance = 2e-2 if exactness == "int8" and format_name == "Q4_1" else 5e-6
        assert (results[0] - want).abs().max() <= tolerance * want.abs().max()


def test_joined_parts_of_several_formats(reference: ReferenceOps) -> None:
    rng = np.random.default_rng(4)
    raws = [make_raw(name, rows, 64, rng) for name, rows in (("Q4_1", 32), ("Q4_1", 19), ("Q8_0", 48), ("Q4_0", 16))]
    x, ops = make_rows(5, 64, rng), make_ops(2, "exact")
    weight = ops.pack_weight(raws, "linear")
    want = reference.linear(x, reference.pack_weight(raws, "linear"))
    assert weight.format == "int4+int8"
    assert (ops.linear(x, weight) - want).abs().max() <= 2e-6 * want.abs().max()
    ids = torch.arange(weight.out_features, dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, weight), reference.embedding(ids, reference.pack_weight(raws, "linear")))


@pytest.mark.parametrize("format_name", [name for name in ALL_FORMATS if name != "Q2_K"])
def test_embedding_rows_are_exact(format_name, reference: ReferenceOps) -> None:
    raw = make_raw(format_name, 50, whole_blocks(format_name, 96), np.random.default_rng(5))
    ids = torch.tensor([0, 49, 17, 17, 31], dtype=torch.int32)
    want = reference.embedding(ids, reference.pack_weight([raw], "head"), 3.0)
    for ops in all_teams():
        assert torch.equal(ops.embedding(ids, ops.pack_weight([raw], "head"), 3.0), want)


def test_q2_k_is_rounded_to_int8_per_group(reference: ReferenceOps) -> None:
    raw, ids = make_raw("Q2_K", 20, 512, np.random.default_rng(11)), torch.arange(20, dtype=torch.int32)
    ops = make_ops()
    weight = ops.pack_weight([raw], "head")
    assert weight.format == "int8_g16"
    groups = reference.embedding(ids, reference.pack_weight([raw], "head"), 1.0).reshape(20, -1, 16)
    error = (ops.embedding(ids, weight, 1.0).reshape(20, -1, 16) - groups).abs()
    assert (error <= groups.abs().amax(dim=2, keepdim=True) * (0.5001 / 127)).all()


@pytest.mark.parametrize("gate", ["Q4_K", "Q6_K"])
def test_gated_halves_of_several_formats(gate, reference: ReferenceOps) -> None:
    rng = np.random.default_rng(12)
    raws, x = [make_raw(name, 64, 256, rng) for name in (gate, "Q4_K")], make_rows(9, 256, rng)
    want = reference.gated_linear(x, reference.pack_weight(raws, "gate_up"), "silu")
    results = [ops.gated_linear(x, ops.pack_weight(raws, "gate_up"), "silu").clone() for ops in all_teams("exact")]
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] - want).abs().max() <= 5e-6 * want.abs().max()


def test_logits_with_a_soft_cap(reference: ReferenceOps) -> None:
    rng = np.random.default_rng(6)
    raw, x = make_raw("F32", 70, 64, rng), make_rows(4, 64, rng) * 8
    want = reference.logits(x, reference.pack_weight([raw], "head"), 30.0)
    results = [ops.logits(x, ops.pack_weight([raw], "head"), 30.0).clone() for ops in all_teams()]
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] - want).abs().max() < 2e-5


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 2e-2), ("int4", 0.25)])
def test_quantising_floats_at_load(quantization, tolerance, reference: ReferenceOps) -> None:
    from headrace.device.ops.cpu.ops import NativeOps

    rng = np.random.default_rng(7)
    raw, x = make_raw("F32", 64, 128, rng), make_rows(9, 128, rng)
    ops = NativeOps(1, "exact", quantization=quantization)
    weight = ops.pack_weight([raw], "linear")
    assert weight.format == quantization
    want = reference.linear(x, reference.pack_weight([raw], "linear"))
    assert (ops.linear(x, weight) - want).abs().max() < tolerance * want.abs().max()


def test_the_float_program_of_int4() -> None:
    """`docs/numerics.md`, spelled out in exact arithmetic with one rounding per operation."""
    rng = np.random.default_rng(8)
    raw, x = make_raw("Q4_1", 5, 128, rng), make_rows(3, 128, rng)
    ops = make_ops(2)
    got = ops.linear(x, ops.pack_weight([raw], "linear")).numpy()
    blocks = raw.data.reshape(5, 4, 20)
    scales = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    low, high = blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4
    q = np.concatenate([low, high], axis=2).astype(np.int64)
    for row in range(3):
        for out in range(5):
            acc = np.float32(0)
            for g in range(4):
                a, da, sa = _quantize_group(x[row, 32 * g : 32 * g + 32].numpy())
                total = np.float32(int((q[out, g] * a).sum()))
                acc = _fma(total, scales[out, g, 0] * da, acc)
                acc = _fma(scales[out, g, 1], sa, acc)
            assert acc == got[row, out]


def _quantize_group(x: np.ndarray) -> tuple[np.ndarray, np.float32, np.float32]:
    peak = np.abs(x).max()
    a = np.clip(np.rint(x * (np.float32(127) / peak)), -127, 127).astype(np.int64)
    scale = peak * np.float32(1.0 / 127.0)
    return a, scale, scale * np.float32(int(a.sum()))


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """One rounding: the exact value is rounded to the nearest of the floats around its double rounding."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.uint32)) & 1))


def test_wrong_shapes_are_refused() -> None:
    rng = np.random.default_rng(9)
    ops = make_ops()
    weight = ops.pack_weight([make_raw("F32", 16, 64, rng)], "linear")
    with pytest.raises(ValueError, match="64"):
        ops.linear(make_rows(3, 32, rng), weight)
    with pytest.raises(TypeError):
        ops.linear(make_rows(3, 64, rng).double(), weight)
    with pytest.raises(ValueError, match="bias"):
        ops.linear(make_rows(3, 64, rng), weight, torch.zeros(3))
    for bad in (-1, 16):
        with pytest.raises(IndexError, match=f"token id {bad}"):
            ops.embedding(torch.tensor([bad], dtype=torch.int32), weight)
    with pytest.raises(IndexError, match="row 3"):
        ops.gather_rows(make_rows(3, 64, rng), torch.tensor([3], dtype=torch.int32))
    assert ops.linear(make_rows(3, 64, rng), weight).shape == (3, 16)


def test_a_bad_row_stays_alone() -> None:
    rng = np.random.default_rng(10)
    raw, x = make_raw("Q4_1", 48, 96, rng), make_rows(20, 96, rng)
    ops = make_ops()
    weight = ops.pack_weight([raw], "linear")
    clean = ops.linear(x, weight).clone()
    x[7, 5], x[11, 40] = float("nan"), float("inf")
    got = ops.linear(x, weight)
    fine = torch.tensor([i not in (7, 11) for i in range(20)])
    assert torch.equal(got[fine], clean[fine])
    assert not got[7].isfinite().any()
    assert not got[11].isfinite().any()
