"""The inputs of a step: native and NumPy fill the same buffers, those that a slow twin expects."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.device.ops.interface import StepMemory, TableMemory
from headrace.device.ops.reference.step_inputs import NO_SLOT, NumpyStepInputs
from tests.ops_cpu.conftest import make_ops

ROWS, WIDTH, SIZES, MAX_TOKENS, MAX_REQS = 9, 70, (4, 16), 100, 7


def _make_memory(rng: np.random.Generator) -> StepMemory:
    def group(size: int) -> TableMemory:
        blocks = -(-WIDTH // size)
        table = rng.integers(1, 500, (ROWS, blocks)).astype(np.int32)
        counts = rng.integers(blocks // 2, blocks + 1, ROWS).astype(np.int32)
        step_table = np.zeros((MAX_REQS, blocks), np.int32)
        return TableMemory(table, counts, size, step_table, np.full(MAX_TOKENS, 77, np.int64))

    token_ids = rng.integers(0, 1000, (ROWS, WIDTH)).astype(np.int32)
    buffers = (np.full(n, 99, np.int32) for n in (MAX_TOKENS, MAX_TOKENS, MAX_REQS + 1, MAX_REQS))
    return StepMemory(token_ids, *buffers, tuple(group(size) for size in SIZES))


def _outputs(memory: StepMemory) -> list[np.ndarray]:
    flat = [memory.ids, memory.positions, memory.query_start_loc, memory.seq_lens]
    return [array.copy() for array in flat + [a for g in memory.groups for a in (g.step_table, g.slots)]]


@pytest.mark.parametrize("seed", range(20))
def test_native_and_numpy_fill_the_same_buffers(seed) -> None:
    rng = np.random.default_rng(seed)
    memory = _make_memory(rng)
    reqs = int(rng.integers(1, MAX_REQS + 1))
    rows = rng.permutation(ROWS)[:reqs]
    room = np.min([g.num_blocks[rows] * g.block_size for g in memory.groups], axis=0).clip(max=WIDTH)
    new = np.minimum(rng.geometric(0.3, reqs), room)
    computed = rng.integers(0, room - new + 1)
    filled = []
    for inputs in (NumpyStepInputs(memory), make_ops().make_step_inputs(memory)):
        tokens = inputs.fill(rows.tolist(), computed.tolist(), new.tolist())
        inputs.pad(reqs, tokens, MAX_TOKENS)
        filled.append(_outputs(memory))
    assert all(np.array_equal(a, b) for a, b in zip(*filled, strict=True))
    places = [(r, p) for r, c, n in zip(rows, computed, new, strict=True) for p in range(c, c + n)]
    assert memory.ids[:tokens].tolist() == [memory.token_ids[place] for place in places]
    assert memory.positions[:tokens].tolist() == [p for _, p in places]
    assert memory.query_start_loc.tolist() == [0, *np.cumsum(new), *[tokens] * (MAX_REQS - reqs)]
    assert memory.seq_lens.tolist() == [*(computed + new), *[0] * (MAX_REQS - reqs)]
    for group in memory.groups:
        slots = [group.table[r, p // group.block_size] * group.block_size + p % group.block_size for r, p in places]
        assert group.slots.tolist() == slots + [NO_SLOT] * (MAX_TOKENS - tokens)
        assert np.array_equal(group.step_table[:reqs], group.table[rows])


@pytest.mark.parametrize(
    ("rows", "computed", "new", "message"),
    [
        ([ROWS], [0], [1], "does not exist"),
        ([-1], [0], [1], "does not exist"),
        ([0], [-1], [1], "cannot compute"),
        ([0], [0], [0], "cannot compute"),
        ([0], [WIDTH], [1], "cannot compute"),
        ([0], [WIDTH // 4], [1], "no block"),
        ([1, 2], [0, 0], [60, 41], "exceeds"),
        ([1] * 8, [0] * 8, [1] * 8, "exceed"),
    ],
)
def test_what_cannot_be_filled_is_an_error_and_writes_nothing(rows, computed, new, message) -> None:
    memory = _make_memory(np.random.default_rng(0))
    for group in memory.groups:
        group.num_blocks[:] = group.table.shape[1]
        group.num_blocks[0] = 1
    before = _outputs(memory)
    for inputs in (NumpyStepInputs(memory), make_ops().make_step_inputs(memory)):
        with pytest.raises(IndexError, match=message):
            inputs.fill(rows, computed, new)
    assert all(np.array_equal(a, b) for a, b in zip(before, _outputs(memory), strict=True))
