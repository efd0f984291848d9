"""Seeds from seeds: one engine seed gives every request its own, and a request's seed one to each of its answers.

A pure 64-bit mix, the same on every machine and in every process.
"""

from __future__ import annotations

from headrace.messages.sampling_params import SEED_LIMIT

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """Spread the bits of a 64-bit integer (two multiply-xorshift rounds; a bijection)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed number ``index`` of ``seed``, at least 0 and below 2^63."""
    return _mix(_mix(seed & _MASK) ^ (index & _MASK)) % SEED_LIMIT


def child_seed(seed: int, index: int) -> int:
    """Return the seed of answer ``index``; the first keeps the request's and so does not depend on ``n``."""
    return derive_seed(seed, index) if index else seed
