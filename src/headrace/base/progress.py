"""The progress word: one shared counter that says whether work advances.

Every native op or eager layer and every turn of the core's loop adds one. A watcher in another process compares two
readings: work pending and the word unchanged means hung. No heartbeat thread ever writes it, for a heart can beat in
a body that no longer moves.

The word lives in shared memory (8 bytes of a mapped file, written by one process at a time, torn reads impossible on
64-bit machines), so that reading it never asks the process that may be stuck. The file may be removed once everybody
has attached; the mappings stay.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

_SHM = "/dev/shm"


class ProgressWord:
    """A counter in process memory or in shared memory.

    Args:
        shared: make a word that other processes can attach to.
        folder: where the file of a new shared word is made; memory-backed where the system has it, by default.
        name: of an existing shared word to attach to.

    The maker of a shared word must call `close`, which removes its file; an attached word only detaches.
    """

    def __init__(
        self,
        *,
        shared: bool = False,
        name: str | None = None,
        folder: str | None = None,
    ) -> None:
        self._owner = shared and name is None
        self._map: mmap.mmap | None = None
        self.name: str | None = name
        if self._owner:
            handle, self.name = tempfile.mkstemp(
                prefix="headrace-progress-",
                dir=folder or (_SHM if os.path.isdir(_SHM) else None),
            )
            os.truncate(handle, 8)
        elif name is not None:
            handle = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._word = np.zeros(1, dtype=np.uint64)
            return
        self._map = mmap.mmap(handle, 8)
        os.close(handle)
        self._word = np.frombuffer(self._map, dtype=np.uint64)

    @property
    def address(self) -> int:
        """Address of the 8 bytes, for native code of this process; valid until `close`."""
        return int(self._word.ctypes.data)

    def advance(self) -> None:
        """Say that something moved."""
        self._word[0] += np.uint64(1)

    def read(self) -> int:
        """The counter now."""
        return int(self._word[0])

    def close(self) -> None:
        """Detach; the maker also removes the file. Idempotent; the last value stays readable."""
        if self._map is None:
            return
        self._word = self._word.copy()
        self._map.close()
        self._map = None
        if self._owner and self.name is not None and os.path.exists(self.name):
            os.unlink(self.name)
