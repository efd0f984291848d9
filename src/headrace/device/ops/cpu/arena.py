"""Memory of activations: buffers come back by themselves when the last tensor over them is gone.

A large tensor from the system's allocator costs a page fault per 4 KiB each time; here the same few buffers go round.
While a plan is captured, an arena of its own hands out buffers of the largest size, so that their lifetimes in the
captured code decide which ops share memory.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

_ALIGNMENT = 64
_MAX_IDLE_BYTES = 24 << 20


class Arena:
    """Free buffers by size. Buffers that nobody uses are kept up to a limit, those used last at the longest."""

    def __init__(self, max_idle_bytes: int = _MAX_IDLE_BYTES) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._idle_bytes = 0
        self._max_idle_bytes = max_idle_bytes

    def take(self, rows: int, width: int) -> torch.Tensor:
        """An uninitialised float32 tensor ``[rows, width]``, aligned to a cache line."""
        size = self._size_of(rows * width * 4)
        free = self._free.get(size)
        if free:
            raw = free.pop()
            self._idle_bytes -= size
        else:
            raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = start_of(raw)
        lent = raw[start : start + rows * width * 4].view(np.float32).reshape(rows, width)
        weakref.finalize(lent, self._give_back, size, raw).atexit = False
        return torch.from_numpy(lent)

    def _size_of(self, num_bytes: int) -> int:
        """The size of the buffer that is taken for so many bytes."""
        return _size_class(num_bytes)

    def _give_back(self, size: int, raw: np.ndarray) -> None:
        # Sizes stand in the order of their last return.
        self._free[size] = [*self._free.pop(size, ()), raw]
        self._idle_bytes += size
        while self._idle_bytes > self._max_idle_bytes:
            oldest = next(iter(self._free))
            self._free[oldest].pop()
            self._idle_bytes -= oldest
            if not self._free[oldest]:
                del self._free[oldest]


def start_of(raw: np.ndarray) -> int:
    """Where in ``raw`` its buffer begins."""
    return int(-raw.ctypes.data % _ALIGNMENT)


def _size_class(num_bytes: int) -> int:
    """Sizes in steps of an eighth of their power of two: little waste, few classes."""
    num_bytes = max(num_bytes, 4096)
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step
