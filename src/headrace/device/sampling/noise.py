"""Gumbel noise as a pure function of (request seed, absolute token position, token id).

Nothing here depends on the batch, the row, the step or any generator state, so a request draws the same noise
whatever runs beside it, after a preemption and after a restart. Another implementation (C++) must give the same bits;
all that it has to reproduce is written here.

Integers are unsigned and wrap around. ``seed`` is reduced modulo 2**64. The key of one draw is::

    mix64(z):  z += 0x9E3779B97F4A7C15
               z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
               z = (z ^ (z >> 27)) * 0x94D049BB133111EB
               return z ^ (z >> 31)                                      (64 bits)
    key = mix64(mix64(seed) ^ position);  low = key mod 2**32;  high = key >> 32

The hash of token id ``t`` under the key is::

    mix32(h):  h = (h ^ (h >> 16)) * 0x85EBCA6B
               h = (h ^ (h >> 13)) * 0xC2B2AE35
               return h ^ (h >> 16)                                      (32 bits)
    hash(t) = mix32(mix32(t ^ low) ^ high)

The noise is float64, every operation rounded on its own (no fused multiply-add)::

    u = (hash + 0.5) * 2**-32                                            (exact, in (0, 1))
    g = -log(-log(u))

``log(x)`` splits x = m * 2**e with m in [0.5, 1); if m < 0.7071067811865476 then m = m + m, e = e - 1. Then::

    f = (m - 1) / (m + 1);  z = f * f
    p = 1/21;  p = p * z + 1/n for n = 19, 17, ..., 1                    (each 1/n rounded to float64)
    log(x) = e * 0.6931471805599453 + (f + f) * p
"""

from __future__ import annotations

import numpy as np

_MASK64 = (1 << 64) - 1
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_COEFFICIENTS = tuple(1.0 / n for n in range(21, 0, -2))
NOISE_MAX = 23.0
"""No noise is above this (2**-33 below one gives 22.88)."""


def _mix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def make_key(seed: int, position: int) -> tuple[np.uint32, np.uint32]:
    """``(low, high)`` of the draw for the token that will stand at ``position``."""
    key = _mix64(_mix64(seed & _MASK64) ^ position)
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)


def _mix32(h: np.ndarray, scratch: np.ndarray) -> None:
    """In place."""
    np.right_shift(h, np.uint32(16), out=scratch)
    h ^= scratch
    h *= np.uint32(0x85EBCA6B)
    np.right_shift(h, np.uint32(13), out=scratch)
    h ^= scratch
    h *= np.uint32(0xC2B2AE35)
    np.right_shift(h, np.uint32(16), out=scratch)
    h ^= scratch


def hash_tokens(key: tuple[np.uint32, np.uint32], token_ids: np.ndarray) -> np.ndarray:
    """uint32 hash per token id."""
    low, high = key
    h = token_ids.astype(np.uint32)
    scratch = np.empty_like(h)
    h ^= low
    _mix32(h, scratch)
    h ^= high
    _mix32(h, scratch)
    return h


def log_of(x: np.ndarray) -> np.ndarray:
    """The logarithm as it is written above."""
    m, e = np.frexp(x)
    small = m < _SQRT_HALF
    m = np.where(small, m + m, m)
    exponent: np.ndarray = (e - small).astype(np.float64)
    f: np.ndarray = (m - 1.0) / (m + 1.0)
    z = f * f
    p: np.ndarray = np.full_like(z, _COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        p = p * z + c
    result: np.ndarray = exponent * _LN2 + (f + f) * p
    return result


def make_noise(hashes: np.ndarray) -> np.ndarray:
    """Gumbel noise, float64, of hashed tokens."""
    u = (hashes.astype(np.float64) + 0.5) * 2.0**-32
    noise: np.ndarray = -log_of(-log_of(u))
    return noise


def min_hash_for(noise: float) -> int:
    """A hash below this gives noise below ``noise`` for certain (a bound with a margin, not an inverse)."""
    if noise <= -3.0:
        return 0
    u = float(np.exp(-np.exp(-noise)))
    return max(0, int(u * (1 - 1e-9) * 2.0**32) - 8)
