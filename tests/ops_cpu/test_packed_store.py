"""Weights that come packed from a store: the same bytes and the same products as those packed here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headrace.device.ops.cpu import _native
from headrace.device.ops.cpu.ops import NativeOps
from tests.ops_cpu.cases import FLOAT_FORMATS, QUANTIZED_FORMATS, make_raw, make_rows, whole_blocks


class MemoryStore:
    """Copies of what was packed, taken in order."""

    def __init__(self) -> None:
        self.weights: list[tuple[str, list[np.ndarray]]] = []
        self.num_taken = 0

    def take(self, form: str) -> Sequence[np.ndarray] | None:
        if self.num_taken == len(self.weights):
            return None
        known, pieces = self.weights[self.num_taken]
        assert known == form
        self.num_taken += 1
        return pieces

    def keep(self, form: str, pieces: Sequence[np.ndarray]) -> None:
        copies = []
        for piece in pieces:
            room = np.empty(len(piece) + 64, np.uint8)
            start = -room.ctypes.data % 64
            copies.append(room[start : start + len(piece)])
            copies[-1][:] = piece
        self.weights.append((form, copies))
        self.num_taken += 1


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("format_name", FLOAT_FORMATS + QUANTIZED_FORMATS)
def test_adopted_weights_give_the_same_bits(format_name, quantization) -> None:
    rng, width = np.random.default_rng(3), whole_blocks(format_name, 96)
    store = MemoryStore()

    def compute() -> list[torch.Tensor]:
        ops = NativeOps(2, "int8", quantization=quantization)
        ops.set_packed_store(store)
        store.num_taken = 0
        joined = ops.pack_weight(parts[:2], "linear")
        mixed = ops.pack_weight([parts[0], other], "linear")
        gated = ops.pack_weight(parts[1:], "gate_up")
        table = ops.pack_weight([parts[2]], "embedding")
        ids = torch.tensor([0, 40, 5], dtype=torch.int32)
        products = [ops.linear(x, joined), ops.linear(x, mixed), ops.gated_linear(x, gated, "silu")]
        return [out.clone() for out in (*products, ops.embedding(ids, table))]

    parts = [make_raw(format_name, rows, width, rng) for rows in (64, 41, 41)]
    other = make_raw("Q8_0", 19, whole_blocks("Q8_0", width), rng)
    x = make_rows(9, width, rng)
    fresh, adopted = compute(), compute()
    assert store.num_taken == len(store.weights) == 4
    for one, two in zip(fresh, adopted, strict=True):
        assert torch.equal(one, two)


def test_pieces_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(4)
    ops, store = NativeOps(1), MemoryStore()
    ops.set_packed_store(store)
    ops.pack_weight([make_raw("Q4_1", 40, 64, rng)], "linear")
    ((_, pieces),) = store.weights
    with pytest.raises(ValueError, match="do not fit"):
        _native.adopt(ops.team, [("Q4_1", 80)], 64, "", False, pieces)
    with pytest.raises(ValueError, match="64 bytes"):
        _native.adopt(ops.team, [("Q4_1", 40)], 64, "", False, [pieces[0][1:]])
    with pytest.raises(ValueError, match="no packed form"):
        _native.adopt(ops.team, [("Q9", 40)], 64, "", False, pieces)


@pytest.mark.parametrize("size", [1, 8, 63, 64, 65, 1000])
def test_the_checksum_sees_every_changed_byte(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = _native.hash_bytes(data)
    assert _native.hash_bytes(data.copy()) == before != _native.hash_bytes(data[:-1])
    for place in range(size):
        data[place] ^= 0x80
        assert _native.hash_bytes(data) != before, place
        data[place] ^= 0x80
