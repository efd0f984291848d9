"""Gives back to the system what start-up needed for a moment, where the C library does not do so by itself."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def give_back_memory() -> None:
    """Return freed memory to the system; takes some milliseconds, and does nothing where the C library cannot."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
