"""Gumbel-max: one draw from a row of scaled logits.

The drawn token is the one with the largest ``float64(logit) + noise``, ties to the lower id, over all survivors. Tokens
that cannot win whatever is computed for them are skipped; this never changes the result.
"""

from __future__ import annotations

import numpy as np

from headrace.device.sampling.noise import NOISE_MAX, hash_tokens, make_key, make_noise, min_hash_for

_NEAR = 6.0
_SMALL = 512


def draw_token(x: np.ndarray, ids: np.ndarray | None, seed: int, position: int) -> int:
    """Draw the token for ``position``.

    Args:
        x: float32 ``[V]``, scaled logits, at least one survivor's finite.
        ids: the survivors, ascending; ``None`` means all.
    """
    values = x if ids is None else x[ids]
    hashes = hash_tokens(make_key(seed, position), np.arange(len(x), dtype=np.uint32) if ids is None else ids)
    contenders = np.arange(len(values)) if len(values) <= _SMALL else _find_contenders(values, hashes)
    scores = values[contenders].astype(np.float64) + make_noise(hashes[contenders])
    best = int(contenders[np.argmax(scores)])
    return best if ids is None else int(ids[best])


def _find_contenders(values: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Ascending places that may win: those near the largest value, and those whose hash makes much noise."""
    bound = float(values.max()) - _NEAR
    near = values >= bound
    places = np.flatnonzero(near)
    best = float(np.max(values[places].astype(np.float64) + make_noise(hashes[places])))
    # A token outside ``near`` needs more noise than this to reach the best score found so far.
    needed = best - bound
    if needed > NOISE_MAX:
        return places
    return np.flatnonzero(near | (hashes >= min_hash_for(needed)))
