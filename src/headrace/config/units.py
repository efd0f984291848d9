"""Sizes with units, as people write them."""

from __future__ import annotations

import re

from headrace.base.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return bytes for ``"256MiB"``, ``"2GB"``, ``"1.5g"`` or a plain number.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"'{text}' is not a size; write for example 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(num_bytes: float) -> str:
    """Return a size for people, for example ``"93.8 MiB"``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{int(num_bytes)} B"
