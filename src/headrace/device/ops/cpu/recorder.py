"""Recording of native ops into a plan.

The recorder hands out buffers of the largest size, remembers which of them hold one row per token and which one row per
row of logits, and keeps the plan's memory alive. Buffers come from an arena of its own: an op's result returns to it
when the captured code drops the tensor, so later ops reuse it as they would have during a run.

A call that no plan can hold splits the recording: what came before is a plan of its own, and its fusions leave alone
all buffers that the captured code still holds, since what follows may read them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace.device.ops.cpu import _native
from headrace.device.ops.cpu.arena import Arena, start_of

_ROW_GAP = 16
"""Floats between rows of logits, so that rows of a vocabulary that is a power of two do not share cache sets."""


class HeadBuffers:
    """Where a recorded head puts its results: the best token and its logit for every row, logits for some.

    Args:
        max_rows: rows of the head.
        max_logits: rows whose logits are kept.
        vocab_size: logits of a row.
    """

    def __init__(self, max_rows: int, max_logits: int, vocab_size: int) -> None:
        # Made by NumPy: a capture refuses the computations of PyTorch.
        self.best = np.zeros(max_rows, dtype=np.int32)
        self.peaks = np.zeros(max_rows, dtype=np.float32)
        # Untouched pages cost nothing: rows that never need logits never pay for them.
        self.memory = np.empty((max_logits, vocab_size + _ROW_GAP), dtype=np.float32)
        self.logits = torch.from_numpy(self.memory[:, :vocab_size])


class Interlude(Protocol):
    """What runs between two plans."""

    name: str

    def run(self, num_tokens: int) -> None:
        """Compute the first rows."""
        ...


class Recorder:
    """Collects the ops of one forward of at most the given sizes.

    Attributes:
        num_tokens: rows of a buffer that holds one row per token.
        plan: the ops since the last split.
        pieces: all that a replay runs, in order, once the recording is finished.
    """

    def __init__(self, max_tokens: int, max_reqs: int, max_logit_rows: int) -> None:
        self.num_tokens = max_tokens
        self._sizes = (max_tokens, max_reqs, max_logit_rows)
        self._max_logit_rows = max_logit_rows
        self._arena = _WatchedArena()
        self._logit_buffers: set[int] = set()
        self._row_bytes: dict[int, int] = {}
        self._kept: list[list[int]] = []
        self.head: HeadBuffers | None = None
        self.plan = _native.Plan(*self._sizes)
        self.pieces: list[_native.Plan | Interlude] = []

    def take(self, rows: int, width: int, like: torch.Tensor | None) -> torch.Tensor:
        """A buffer for as many rows as ``like`` may have; shown with ``rows`` rows."""
        if like is not None and like.data_ptr() in self._logit_buffers:
            return self.take_logit_rows(rows, width)
        assert rows <= self.num_tokens
        out = self._arena.take(self.num_tokens, width)
        self._logit_buffers.discard(out.data_ptr())
        self.add_rows(out)
        return out[:rows]

    def take_logit_rows(self, rows: int, width: int) -> torch.Tensor:
        """A buffer for rows that need logits."""
        assert rows <= self._max_logit_rows
        out = self._arena.take(self._max_logit_rows, width)
        self._logit_buffers.add(out.data_ptr())
        return out[:rows]

    def make_head(self, vocab_size: int, max_logits: int) -> HeadBuffers:
        """Where the head of this plan puts its results."""
        assert self.head is None, "a plan has one head"
        self.head = HeadBuffers(self._max_logit_rows, max_logits, vocab_size)
        return self.head

    def rows_of(self, x: torch.Tensor) -> _native.Rows:
        """What the rows of ``x`` are."""
        return _native.Rows.LOGITS if x.data_ptr() in self._logit_buffers else _native.Rows.TOKENS

    def append(self, op: _native.Op) -> None:
        """Record an op."""
        self.plan.append(op)

    def split(self, interlude: Interlude) -> None:
        """End the plan before ``interlude`` and begin the next one after it."""
        self._close(list(self._arena.lent))
        self.pieces.append(interlude)

    def finish(self, team: _native.Team, kept: list[int]) -> None:
        """End the recording; ``kept`` are buffers that somebody reads after a replay."""
        self._close(kept)
        plans = [piece for piece in self.pieces if isinstance(piece, _native.Plan)]
        for plan, addresses in zip(plans, self._kept, strict=True):
            plan.finish(team, addresses)

    def add_rows(self, x: torch.Tensor) -> None:
        """Take note of a buffer with one row per token."""
        self._row_bytes[_base(x)] = x.stride(0) * x.element_size()

    def add_other(self, x: torch.Tensor) -> None:
        """Take note of a buffer of the step with other rows."""
        self._row_bytes[_base(x)] = 0

    def is_of_step(self, x: torch.Tensor) -> bool:
        """Whether ``x`` shows a buffer that every step fills anew."""
        return _base(x) in self._row_bytes

    def has_rows(self, x: torch.Tensor) -> bool:
        """Whether ``x`` shows all of the tokens, in order and along its first axis."""
        row_bytes = self._row_bytes.get(_base(x), 0)
        in_rows = x.dim() > 0 and len(x) == self.num_tokens and x.stride(0) * x.element_size() == row_bytes
        return in_rows and x.data_ptr() - _base(x) < row_bytes

    def is_lent(self, x: torch.Tensor) -> bool:
        """Whether ``x`` shows a buffer of the arena."""
        return _base(x) in self._arena.lent

    def _close(self, kept: list[int]) -> None:
        if self.plan.op_names:
            self.pieces.append(self.plan)
            self._kept.append(kept)
        self.plan = _native.Plan(*self._sizes)


class _WatchedArena(Arena):
    """Knows the addresses of the buffers that somebody holds, and never gives memory back: plans read it by address.

    Only results of equal width share a buffer, so that a row has the same place in all of them: threads that are at
    different ops, each with rows of its own, then never meet in one.
    """

    def __init__(self) -> None:
        super().__init__(max_idle_bytes=1 << 62)
        self.lent: set[int] = set()

    def take(self, rows: int, width: int) -> torch.Tensor:
        out = super().take(rows, width)
        self.lent.add(out.data_ptr())
        return out

    def _size_of(self, num_bytes: int) -> int:
        return num_bytes

    def _give_back(self, size: int, raw: np.ndarray) -> None:
        self.lent.discard(raw.ctypes.data + start_of(raw))
        super()._give_back(size, raw)


def _base(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
