"""How long this process has existed, for start-up timelines that leave nothing out."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_START_FIELD = 19
"""Place of the start time in ``/proc/self/stat``, counted behind the command's closing parenthesis."""


def seconds_since_start() -> float:
    """Seconds since the process was made; where the system does not tell, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED
