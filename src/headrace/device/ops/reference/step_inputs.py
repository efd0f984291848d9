"""The inputs of a step, filled by NumPy: the twin of the native `StepInputs`."""

from __future__ import annotations

import numpy as np

from headrace.device.ops.interface import StepMemory

NO_SLOT = -1


class NumpyStepInputs:
    """See `headrace.device.ops.interface.StepInputs`."""

    def __init__(self, memory: StepMemory) -> None:
        self._memory = memory

    def fill(self, rows: list[int], num_computed: list[int], num_new: list[int]) -> int:
        """Write a step into the buffers."""
        index_of, computed, new = (np.array(a, dtype=np.int64) for a in (rows, num_computed, num_new))
        seq_lens, tokens = computed + new, int(new.sum())
        self._check(index_of, computed, new, seq_lens, tokens)
        self._write(index_of, computed, new, seq_lens, tokens)
        return tokens

    def _write(
        self, rows: np.ndarray, num_computed: np.ndarray, num_new: np.ndarray, seq_lens: np.ndarray, tokens: int
    ) -> None:
        memory, num_reqs = self._memory, len(rows)
        starts = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(num_new, out=starts[1:])
        token_rows = np.repeat(rows, num_new)
        positions = np.arange(tokens) + np.repeat(num_computed - starts[:-1], num_new)
        memory.ids[:tokens] = memory.token_ids[token_rows, positions]
        memory.positions[:tokens] = positions
        memory.query_start_loc[: num_reqs + 1] = starts
        memory.seq_lens[:num_reqs] = seq_lens
        for group in memory.groups:
            np.take(group.table, rows, axis=0, out=group.step_table[:num_reqs], mode="clip")
            index, offset = np.divmod(positions, group.block_size)
            group.slots[:tokens] = group.table[token_rows, index].astype(np.int64) * group.block_size + offset

    def pad(self, reqs: int, begin: int, end: int) -> None:
        """Make padding of what lies behind a step."""
        memory = self._memory
        memory.ids[begin:end] = 0
        memory.positions[begin:end] = 0
        memory.query_start_loc[reqs + 1 :] = begin
        memory.seq_lens[reqs:] = 0
        for group in memory.groups:
            group.slots[begin:end] = NO_SLOT

    def _check(
        self, rows: np.ndarray, computed: np.ndarray, new: np.ndarray, seq_lens: np.ndarray, tokens: int
    ) -> None:
        memory = self._memory
        max_rows, row_tokens = memory.token_ids.shape
        if len(rows) > len(memory.seq_lens):
            raise IndexError(f"{len(rows)} requests exceed {len(memory.seq_lens)}")
        if (rows < 0).any() or (rows >= max_rows).any():
            raise IndexError(f"one of the rows {rows.tolist()} does not exist")
        if (computed < 0).any() or (new < 1).any() or (seq_lens > row_tokens).any():
            raise IndexError(f"a row of {row_tokens} tokens cannot compute {new.tolist()} behind {computed.tolist()}")
        for group in memory.groups:
            if (group.num_blocks[rows] * group.block_size < seq_lens).any():
                raise IndexError("a scheduled token has no block")
        if tokens > len(memory.ids):
            raise IndexError(f"a step of {tokens} tokens exceeds the {len(memory.ids)} that inputs hold")
