"""The reference operators against straightforward mathematics in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.device.attention.backend import LayerFacts
from headrace.device.attention.cpu_layout import allocate_cpu_blocks, make_cpu_spec
from headrace.device.attention.metadata import LayerCache
from headrace.device.ops.interface import WeightRole
from headrace.device.ops.reference.ops import ReferenceOps, ReferenceWeight
from headrace.device.quantization.raw_tensor import make_raw_float
from tests.device.ops_cases import Shape, expected_attention, expected_rotation, make_paged_case
from tests.device.test_formats import random_tensor

OPS = ReferenceOps()
G = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


def pack(matrix: torch.Tensor, role: WeightRole = "linear") -> ReferenceWeight:
    return OPS.pack_weight([make_raw_float("w", matrix.numpy())], role)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=tolerance, rtol=tolerance)


def test_parts_of_different_formats_are_joined_by_rows() -> None:
    parts = [random_tensor("Q4_1", 3, 64), random_tensor("Q8_0", 2, 64), random_tensor("F32", 4, 64)]
    weight = OPS.pack_weight(parts, "linear")
    assert (weight.out_features, weight.in_features, weight.format) == (9, 64, "float32")
    assert weight.num_bytes == 9 * 64 * 4
    x = randn(5, 64)
    expected = torch.cat([x @ torch.from_numpy(part.dequantize()).T for part in parts], dim=-1)
    close(OPS.linear(x, weight), expected)


def test_linear_adds_a_bias() -> None:
    x, w, b = randn(3, 8), randn(5, 8), randn(5)
    close(OPS.linear(x, pack(w), b), (x.double() @ w.double().T + b))


def test_embedding_takes_scaled_rows() -> None:
    table = randn(10, 6)
    ids = torch.tensor([3, 0, 3], dtype=torch.int32)
    close(OPS.embedding(ids, pack(table, "head"), 2.5), table[ids.long()] * 2.5)
    close(OPS.embedding(ids, pack(table, "embedding")), table[ids.long()])


def test_norms() -> None:
    x, residual, weight = randn(4, 12), randn(4, 12), randn(12)

    def norm(v: torch.Tensor) -> torch.Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    close(OPS.rms_norm(x, weight, 1e-6), norm(x))
    total = x + residual
    normed, summed = OPS.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    close(normed, norm(total))
    close(summed, total)
    close(OPS.add(x.clone(), residual), total)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_linear(activation: str) -> None:
    x, gate, up = randn(3, 8), randn(6, 8), randn(6, 8)
    weight = OPS.pack_weight([make_raw_float("g", gate.numpy()), make_raw_float("u", up.numpy())], "gate_up")
    g = x.double() @ gate.double().T
    inner = (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)
    act = {
        "silu": g / (1 + (-g).exp()),
        "gelu": g * 0.5 * (1 + torch.erf(g / 2**0.5)),
        "gelu_tanh": g * 0.5 * (1 + torch.tanh(inner)),
    }[activation]
    close(OPS.gated_linear(x, weight, activation), act * (x.double() @ up.double().T))  # type: ignore[arg-type]


def test_logits_are_float32_and_capped() -> None:
    x, head = randn(2, 8), randn(20, 8)
    raw = x.double() @ head.double().T
    close(OPS.logits(x, pack(head, "head")), raw)
    close(OPS.logits(x, pack(head, "head"), 5.0), 5 * torch.tanh(raw / 5))
    close(OPS.gather_rows(x, torch.tensor([1], dtype=torch.int32)), x[1:])


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_are_mixed(renormalize: bool) -> None:
    x, router = randn(5, 8), randn(4, 8)
    gates, ups, downs = randn(4, 6, 8), randn(4, 6, 8), randn(4, 8, 6)
    gate_up = [
        OPS.pack_weight([make_raw_float("g", g.numpy()), make_raw_float("u", u.numpy())], "gate_up")
        for g, u in zip(gates, ups, strict=True)
    ]
    actual = OPS.moe(x, pack(router), gate_up, [pack(d) for d in downs], 2, "silu", renormalize)
    expected = torch.zeros_like(x)
    for t in range(5):
        probs = torch.softmax(router @ x[t], dim=0)
        top = probs.topk(2)
        scale = top.values.sum() if renormalize else 1.0
        for prob, e in zip(top.values, top.indices, strict=True):
            hidden = torch.nn.functional.silu(gates[e] @ x[t]) * (ups[e] @ x[t])
            expected[t] += prob / scale * (downs[e] @ hidden)
    close(actual, expected)


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("norm", ["none", "head", "full"])
def test_rotate_and_store(rotary_dim: int, norm: str) -> None:
    shape = Shape()
    case = make_paged_case(shape, [(3, 7), (1, 9)], poison=False)
    tokens = case.meta.num_tokens
    positions = torch.tensor([4, 5, 6, 8], dtype=torch.int32)
    angles = randn(16, rotary_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    qkv = randn(tokens, 8 * 16)
    q, k, v = (part.clone().view(tokens, -1, 16) for part in qkv.split([64, 32, 32], dim=-1))
    qk_norm = None
    if norm != "none":
        sizes = (16, 16) if norm == "head" else (64, 32)
        qk_norm = (randn(sizes[0]), randn(sizes[1]), 1e-6)
        q = OPS.rms_norm(q.reshape(tokens, -1, sizes[0]), qk_norm[0], 1e-6).view(tokens, -1, 16)
        k = OPS.rms_norm(k.reshape(tokens, -1, sizes[1]), qk_norm[1], 1e-6).view(tokens, -1, 16)
    case.meta.slot_mapping[1] = -1
    before = case.cache.key.clone()
    rotated = OPS.rotate_and_store(qkv, positions, cos_sin, shape, case.meta, case.cache, qk_norm)
    close(rotated.view(tokens, -1, 16), expected_rotation(q, positions, cos_sin))
    expected_k = expected_rotation(k, positions, cos_sin)
    written = torch.zeros(len(before), 4, dtype=torch.bool)
    for t, slot in enumerate(case.meta.slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, 4)
        written[block, offset] = True
        close(case.cache.key[block, :, :, offset], expected_k[t])
        close(case.cache.value[block, :, offset], v[t])
    untouched = ~written[:, None, None, :].expand_as(before)
    assert torch.equal(case.cache.key[untouched], before[untouched])


SHAPES = {
    "plain": Shape(),
    "one head each": Shape(num_kv_heads=4),
    "one kv head": Shape(num_kv_heads=1, num_heads=3),
    "window": Shape(window=5),
    "chunk": Shape(chunk=6),
    "soft cap": Shape(softcap=2.0, scale=1.0),
    "sinks": Shape(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "window and sinks": Shape(window=3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
MIXES = {
    "decode": [(1, 1), (1, 14), (1, 9), (1, 4)],
    "prefill": [(9, 9), (5, 5)],
    "mixed": [(1, 13), (1, 2), (3, 17), (8, 8), (2, 12)],
    "one": [(1, 23)],
}


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention(name: str, mix: str, dtype: torch.dtype) -> None:
    case = make_paged_case(SHAPES[name], MIXES[mix], dtype=dtype)
    q = torch.cat(case.queries).reshape(case.meta.num_tokens, -1)
    close(OPS.attention(q, case.shape, case.meta, case.cache), expected_attention(case))


def test_int8_blocks_keep_a_scale_per_token_and_head() -> None:
    shape = Shape()
    facts = LayerFacts(shape.num_kv_heads, shape.head_dim)
    cache = allocate_cpu_blocks(make_cpu_spec(facts, 4, "int8"), 8)
    case = make_paged_case(shape, [(6, 6), (3, 3)])
    case = replace(case, cache=cache, meta=replace(case.meta))
    case.meta.block_table[0, :2], case.meta.block_table[1, 0] = torch.tensor([5, 2], dtype=torch.int32), 7
    case.meta.slot_mapping = torch.tensor([20, 21, 22, 23, 8, 9, 28, 29, 30])
    q, k, v = torch.cat(case.queries), torch.cat(case.keys), torch.cat(case.values)
    k[4, 1] = 0.0
    qkv = torch.cat([part.reshape(9, -1) for part in (q, k, v)], dim=-1)
    cos_sin = torch.cat([torch.ones(16, 8), torch.zeros(16, 8)], dim=-1)
    OPS.rotate_and_store(qkv, torch.zeros(9, dtype=torch.int32), cos_sin, shape, case.meta, cache)
    assert cache.scales is not None
    stored = cache.key[5, :, :, 2].float() * cache.scales[5, :, 0, 2, None]
    assert ((stored - k[2]).abs() <= cache.scales[5, :, 0, 2, None] * 0.501).all()
    assert (cache.key[2, 1, :, 0].count_nonzero(), cache.scales[2, 1, 0, 0].item()) == (0, 0.0)
    key = cache.key.float() * cache.scales[:, :, 0, None, :]
    value = cache.value.float() * cache.scales[:, :, 1, :, None]
    wide = LayerCache(key, value)
    for meta in (case.meta, replace(case.meta, query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32))):
        tokens = q.reshape(9, -1)[: int(meta.query_start_loc[meta.num_reqs])]
        close(OPS.attention(tokens, shape, meta, cache), OPS.attention(tokens, shape, meta, wide))


def test_float16_blocks_clamp_instead_of_overflowing() -> None:
    shape = Shape()
    case = make_paged_case(shape, [(1, 1)], dtype=torch.float16)
    cos_sin = torch.cat([torch.ones(16, 8), torch.zeros(16, 8)], dim=-1)
    OPS.rotate_and_store(
        torch.full((1, 128), 1e6), torch.zeros(1, dtype=torch.int32), cos_sin, shape, case.meta, case.cache
    )
    slot = int(case.meta.slot_mapping[0])
    assert case.cache.key[slot // 4, :, :, slot % 4].eq(65504).all()


def test_large_batches_and_prompts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.device.ops.reference import attention

    monkeypatch.setattr(attention, "_MAX_ELEMENTS", 800)
    case = make_paged_case(Shape(), [(1, n) for n in (3, 20, 11, 1, 16, 8)] + [(25, 60), (30, 30)])
    q = torch.cat(case.queries).reshape(case.meta.num_tokens, -1)
    close(OPS.attention(q, case.shape, case.meta, case.cache), expected_attention(case))


def test_bfloat16_activations_stay_near() -> None:
    ops = ReferenceOps(torch.bfloat16)
    x, w = randn(4, 32), randn(8, 32)
    y = ops.linear(x.to(torch.bfloat16), ops.pack_weight([make_raw_float("w", w.numpy())], "linear"))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x @ w.T, atol=0.15, rtol=0.05)
