"""Recording of native ops into a plan.

The recorder hands out buffers of the largest size, remembers which of them hold one row per token and which one row per
row of logits, and keeps the plan's memory alive. Buffers come from an arena of its own: an op's result returns to it
when the captured code drops the tensor, so later ops reuse it as they would have during a run.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.device.ops.cpu import _native
from headrace.device.ops.cpu.arena import Arena

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


class Recorder:
    """Collects the ops of one forward of at most the given sizes."""

    def __init__(self, max_tokens: int, max_reqs: int, max_logit_rows: int) -> None:
        self._max_tokens = max_tokens
        self._max_logit_rows = max_logit_rows
        self._arena = Arena(max_idle_bytes=1 << 62)
        self._logit_buffers: set[int] = set()
        self.head: HeadBuffers | None = None
        self.plan = _native.Plan(max_tokens, max_reqs, max_logit_rows)

    def take(self, rows: int, width: int, like: torch.Tensor | None) -> torch.Tensor:
        """A buffer for as many rows as ``like`` may have; shown with ``rows`` rows."""
        if like is not None and like.data_ptr() in self._logit_buffers:
            return self.take_logit_rows(rows, width)
        assert rows <= self._max_tokens
        out = self._arena.take(self._max_tokens, width)
        self._logit_buffers.discard(out.data_ptr())
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
