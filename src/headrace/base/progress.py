"""The progress word: one shared counter that says whether work advances.

Every native op or eager layer and every turn of the core's loop adds one. A watcher in another process compares two
readings: work pending and the word unchanged means hung. No heartbeat thread ever writes it, for a heart can beat in
a body that no longer moves.

The word lives in shared memory (8 bytes, written by one process at a time, torn reads impossible on 64-bit machines),
so that reading it never asks the process that may be stuck.
"""

from __future__ import annotations

from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import numpy as np


class ProgressWord:
    """A counter in process memory or in shared memory.

    Args:
        name: of an existing shared word to attach to; ``None`` with ``shared`` makes a new one.
        shared: whether other processes must see it.

    The maker owns the memory and must call `close`; an attached word only detaches.
    """

    def __init__(self, *, shared: bool = False, name: str | None = None) -> None:
        self._owner = name is None
        self._memory: SharedMemory | None = None
        if shared or name is not None:
            self._memory = SharedMemory(name=name, create=name is None, size=8)
            if not self._owner:
                # Python 3.11 registers attached segments too and would unlink the owner's memory at exit.
                resource_tracker.unregister(self._memory._name, "shared_memory")  # type: ignore[attr-defined]
            self._word: np.ndarray = np.ndarray((1,), dtype=np.uint64, buffer=self._memory.buf)
            if self._owner:
                self._word[0] = 0
        else:
            self._word = np.zeros(1, dtype=np.uint64)

    @property
    def name(self) -> str | None:
        """Name to attach to from another process, or ``None`` for a private word."""
        return self._memory.name if self._memory is not None else None

    @property
    def address(self) -> int:
        """Address of the 8 bytes, for native code of this process."""
        return int(self._word.ctypes.data)

    def advance(self) -> None:
        """Say that something moved."""
        self._word[0] += np.uint64(1)

    def read(self) -> int:
        """The counter now."""
        return int(self._word[0])

    def close(self) -> None:
        """Detach; the owner also removes the memory. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self._word = self._word.copy()
        memory.close()
        if self._owner:
            memory.unlink()
