"""Block ids of every row, one table per KV cache group.

Owns the tables. Changes are staged while a step's requests are read and applied
in one call. Blocks given to a row stay its own until the row ends; the table never takes one back, so a step that
runs again (with later ones dropped) may bring blocks that the row already has: they are recognised by their place and
not added twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.messages.scheduler_output import BlockIds


class BlockTables:
    """Tables of all groups.

    Args:
        max_rows: number of rows.
        max_tokens: most tokens of a row.
        block_sizes: tokens of a block, per group.
    """

    def __init__(self, max_rows: int, max_tokens: int, block_sizes: Sequence[int]) -> None:
        self.block_sizes = tuple(block_sizes)
        self.tables = [np.zeros((max_rows, -(-max_tokens // size)), dtype=np.int32) for size in block_sizes]
        self.num_blocks = np.zeros((len(block_sizes), max_rows), dtype=np.int32)
        self._staged: list[tuple[int, int, int | None, list[int]]] = []

    def stage_row(self, row: int, block_ids: BlockIds) -> None:
        """Replace all blocks of a row."""
        for group, ids in enumerate(block_ids):
            self._staged.append((group, row, None, ids))

    def stage_append(self, row: int, block_ids: BlockIds, num_computed_tokens: int) -> None:
        """Add blocks behind those of a row. None of them holds a token that was computed before this step."""
        for group, ids in enumerate(block_ids):
            if ids:
                self._staged.append((group, row, num_computed_tokens // self.block_sizes[group], ids))

    def apply_staged(self) -> None:
        """Write what was staged, in order."""
        for group, row, search_from, ids in self._staged:
            table = self.tables[group]
            start = 0 if search_from is None else self._place(group, row, search_from, ids[0])
            end = start + len(ids)
            if end > table.shape[1]:
                raise RuntimeError(f"{end} blocks do not fit a row of {table.shape[1]}")
            table[row, start:end] = ids
            if search_from is None:
                table[row, end:] = 0
                self.num_blocks[group, row] = end
            else:
                self.num_blocks[group, row] = max(end, int(self.num_blocks[group, row]))
        self._staged.clear()

    def drop_staged(self) -> None:
        """Forget what was staged (the step failed before it was applied)."""
        self._staged.clear()

    def _place(self, group: int, row: int, search_from: int, first_id: int) -> int:
        """Where a block stands already among those that hold no computed token, or the end of the row."""
        count = int(self.num_blocks[group, row])
        if search_from >= count:
            return count
        same = np.flatnonzero(self.tables[group][row, search_from:count] == first_id)
        return search_from + int(same[0]) if len(same) else count
