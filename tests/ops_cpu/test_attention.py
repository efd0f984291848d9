"""Rotation, store and paged attention: close to the oracle; a token's result depends on its own request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.ops.reference.ops import ReferenceOps
from tests.ops_cpu.cases import AttentionCase, make_attention
from tests.ops_cpu.conftest import all_teams, make_ops

MIXED = ((5, 5), (1, 130), (70, 200), (1, 1), (3, 66))
LONG = ((130, 300), (1, 200), (33, 97))
F32, F16, I8 = torch.float32, torch.float16, torch.int8

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "smollm2": ((MIXED, 9, 3, 64, 16, F32), {}),
    "smollm2 half": ((MIXED, 9, 3, 64, 32, F16), {}),
    "smollm2 int8": ((MIXED, 9, 3, 64, 32, I8), {}),
    "window": ((MIXED, 9, 3, 64, 32, F16), {"window": 40}),
    "chunk and soft cap": ((MIXED, 8, 8, 128, 32, F16), {"chunk": 64, "softcap": 20.0}),
    "sinks and norms per head": ((MIXED, 16, 2, 64, 64, F32), {"sinks": True, "qk_norm": "head"}),
    "odd sizes and full norms": ((MIXED, 10, 1, 24, 4, F32), {"qk_norm": "full"}),
    "odd heads": ((MIXED, 3, 3, 25, 5, F16), {"window": 31}),
    "one kv head for many": ((MIXED, 32, 1, 80, 16, F16), {}),
    "small blocks": ((MIXED, 4, 2, 16, 8, I8), {"window": 20}),
    "two decodes": ((((1, 280), (1, 5)), 9, 3, 64, 16, F16), {}),
    "long prompts": ((LONG, 9, 3, 64, 32, F16), {}),
    "long prompts exact": ((LONG, 9, 3, 64, 16, F32), {}),
    "long prompts int8": ((LONG, 8, 2, 32, 32, I8), {"window": 100}),
    "long prompts of many heads": ((((40, 150), (1, 90)), 14, 2, 64, 32, F16), {"chunk": 100}),
    "odd window": ((LONG, 9, 3, 64, 16, I8), {"window": 45, "softcap": 5.0, "sinks": True}),
    "many decodes": ((tuple((1, 20 * i + 1) for i in range(20)), 9, 3, 64, 32, F16), {}),
}


def _make(name: str) -> AttentionCase:
    args, more = CASES[name]
    return make_attention(*args, **more)


def _run(ops: Any, case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor, LayerCache]:
    cache = case.fresh_cache()
    q = ops.rotate_and_store(case.qkv.clone(), case.positions, case.cos_sin, case.shape, case.meta, cache, case.qk_norm)
    return q.clone(), ops.attention(q, case.shape, case.meta, cache).clone(), cache


both_modes = pytest.mark.parametrize("activations", ["exact", "int8"])


@pytest.mark.parametrize("name", CASES)
def test_close_to_the_oracle(name, reference: ReferenceOps) -> None:
    case = _make(name)
    q, out, cache = _run(make_ops(2, "exact"), case)
    want_q, want, want_cache = _run(reference, case)
    torch.testing.assert_close(q, want_q, rtol=2e-6, atol=2e-6)
    # The blocks hold each implementation's own roundings: one step of their type apart at most.
    step = {F32: 2e-6, F16: 4e-3, I8: 1.0}[cache.key.dtype]
    assert (cache.key.float() - want_cache.key.float()).abs().max() <= step
    assert (cache.value.float() - want_cache.value.float()).abs().max() <= step
    again = reference.attention(q, case.shape, case.meta, cache)
    tolerance = 2e-5 if case.shape.softcap else 3e-6
    torch.testing.assert_close(out, again, rtol=0, atol=tolerance)
    torch.testing.assert_close(out, want, rtol=0, atol=2e-2 if cache.key.dtype == I8 else 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_rounded_factors_are_close_to_the_oracle(name, reference: ReferenceOps) -> None:
    """The oracle takes queries, keys and values rounded to bfloat16; what is left is the rounding of probabilities."""
    case = _make(name)
    q, out, cache = _run(make_ops(2, "int8"), case)
    if cache.scales is None:
        cache = LayerCache(cache.key.bfloat16().float(), cache.value.bfloat16().float())
    want = reference.attention(q.bfloat16().float(), case.shape, case.meta, cache)
    sizes = reference.attention(q.bfloat16().float(), case.shape, case.meta, cache._replace(value=cache.value.abs()))
    # Half a step of eight bits and the error of the power: once above and once below the line.
    share = 2.0**-8 + 1.1e-4
    assert ((out - want).abs() <= share * (sizes + want.abs()) + 3e-5).all()
    assert (out - want).abs().mean() <= 0.3 * share * sizes.mean()


@both_modes
@pytest.mark.parametrize("name", CASES)
def test_teams_agree_bit_for_bit(name, activations) -> None:
    case = _make(name)
    results = [_run(ops, case) for ops in all_teams(activations)]
    for q, out, cache in results[1:]:
        assert torch.equal(q, results[0][0])
        assert torch.equal(out, results[0][1])
        assert all(torch.equal(a, b) for a, b in zip(cache, results[0][2], strict=True) if a is not None)


@both_modes
@pytest.mark.parametrize("size", [1e-38, 3e-20, 1e18])
def test_teams_agree_on_tiny_and_huge_numbers(size, activations) -> None:
    """Subnormal factors and products are the same on every instruction set, whatever becomes of them."""
    case = _make("smollm2")
    rng = torch.Generator().manual_seed(1)
    for values in (case.qkv, case.cache.key, case.cache.value):
        values *= size * torch.exp2(torch.randint(-20, 1, values.shape, generator=rng).float())
    results = [_run(ops, case)[1] for ops in all_teams(activations)]
    assert results[0].isfinite().all()
    assert all(torch.equal(result, results[0]) for result in results[1:])


@both_modes
@pytest.mark.parametrize("name", CASES)
def test_a_token_is_the_same_alone(name, activations) -> None:
    """Any cut of a prompt gives the same: here, the finest one, request by request."""
    case, ops = _make(name), make_ops(2, activations)
    q, out, cache = _run(ops, case)
    starts, totals = case.meta.query_start_loc.tolist(), case.meta.seq_lens.tolist()
    for req, total in enumerate(totals):
        for token in range(starts[req], starts[req + 1]):
            seen = total - (starts[req + 1] - token) + 1
            meta = AttentionMetadata(
                num_tokens=1,
                num_reqs=1,
                max_query_len=1,
                max_seq_len=seen,
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.tensor([seen], dtype=torch.int32),
                block_table=case.meta.block_table[req : req + 1],
                slot_mapping=case.meta.slot_mapping[token : token + 1],
            )
            assert torch.equal(ops.attention(q[token : token + 1].contiguous(), case.shape, meta, cache)[0], out[token])


@both_modes
@pytest.mark.parametrize("name", ["window", "odd heads"])
def test_what_nobody_may_see_changes_nothing(name, activations) -> None:
    """Slots past a request's end and blocks before its window may hold anything, even NaN."""
    case, ops = _make(name), make_ops(2, activations)
    _, out, cache = _run(ops, case)
    seen = torch.zeros(cache.key.shape[0], cache.key.shape[3], dtype=torch.bool)
    block_size = cache.key.shape[3]
    starts = case.meta.query_start_loc.tolist()
    for req, total in enumerate(case.meta.seq_lens.tolist()):
        first = max(0, total - (starts[req + 1] - starts[req]) - case.shape.window + 1)
        for position in range(first, total):
            seen[case.meta.block_table[req, position // block_size], position % block_size] = True
    case.cache = LayerCache(
        cache.key.masked_fill(~seen[:, None, None, :], float("nan")),
        cache.value.masked_fill(~seen[:, None, :, None], float("nan")),
    )
    assert torch.equal(_run(ops, case)[1], out)


@pytest.mark.parametrize("window", [20, 40, 64])
def test_blocks_before_the_window_are_not_looked_up(window) -> None:
    case, ops = make_attention(((1, 200), (1, 81), (30, 150)), 9, 3, 64, 16, F16, window=window), make_ops()
    _, out, _ = _run(ops, case)
    starts = case.meta.query_start_loc.tolist()
    for req, total in enumerate(case.meta.seq_lens.tolist()):
        first = total - (starts[req + 1] - starts[req]) - window + 1
        case.meta.block_table[req, : max(0, first) // 16] = 10**8
    assert torch.equal(_run(ops, case)[1], out)


def test_padding_writes_nothing() -> None:
    case, ops = _make("smollm2"), make_ops()
    case.meta.slot_mapping[3] = -1
    untouched = case.fresh_cache()
    _, _, cache = _run(ops, case)
    slot = _make("smollm2").meta.slot_mapping[3]
    block, offset = int(slot) // 16, int(slot) % 16
    assert torch.equal(cache.key[block, :, :, offset], untouched.key[block, :, :, offset])


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("slot_mapping", 2, 10**9, "slot"),
        ("slot_mapping", 0, -2, "slot"),
        ("block_table", (1, 0), 10**6, "block"),
        ("block_table", (2, 1), -1, "block"),
        ("seq_lens", 0, 10**6, "request 0"),
        ("seq_lens", 2, 3, "request 2"),
        ("query_start_loc", 1, 200, "request"),
        ("query_start_loc", 5, 3, "query_start_loc"),
    ],
)
def test_indices_out_of_range_are_errors(field, index, value, message) -> None:
    case, ops = _make("smollm2"), make_ops()
    getattr(case.meta, field)[index] = value
    with pytest.raises(IndexError, match=message):
        _run(ops, case)
    _run(ops, _make("smollm2"))


def test_positions_out_of_range_are_errors() -> None:
    case, ops = _make("smollm2"), make_ops()
    case.positions[0] = len(case.cos_sin)
    with pytest.raises(IndexError, match="position"):
        _run(ops, case)


def test_blocks_of_wrong_shape_are_refused() -> None:
    case, ops = _make("smollm2"), make_ops()
    key, value, _ = case.cache
    case = replace(case, cache=LayerCache(value, value))
    with pytest.raises(ValueError, match="keys must be"):
        _run(ops, case)
    case = replace(case, cache=LayerCache(key.double(), value.double()))
    with pytest.raises(ValueError, match="must be float32, float16 or int8"):
        _run(ops, case)
