"""The weight of a token: its unnormalised probability as an integer, whose sums do not depend on their order.

`docs/numerics.md` has the program; the native kernel gives the same bits.
"""

from __future__ import annotations

import numpy as np

ONE = float(1 << 34)
"""Weight of the token that weights are relative to."""
_MAGIC = float(3 << 51)
"""Added to a number it leaves the number's integer part in the low bits of the sum."""
_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_COEFFICIENTS = (
    1 / 39916800,
    1 / 3628800,
    1 / 362880,
    1 / 40320,
    1 / 5040,
    1 / 720,
    1 / 120,
    1 / 24,
    1 / 6,
    0.5,
    1.0,
    1.0,
)


def weigh(x: np.ndarray, peak: np.float32) -> np.ndarray:
    """``2**34 * exp(x - peak)`` for float32 ``x`` of at most ``peak``, as int64."""
    t = np.maximum(x - peak, np.float32(-30.0)).astype(np.float64)
    shifted = t * _LOG2E + _MAGIC
    whole = shifted - _MAGIC
    r = (t - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = np.full(len(x), _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = p * r + coefficient
    magic_bits = np.float64(_MAGIC).view(np.int64)
    exponents = (shifted.view(np.int64) - magic_bits + 1023 + 34) << 52
    weights: np.ndarray = (p * exponents.view(np.float64) + _MAGIC).view(np.int64) - magic_bits
    return weights
