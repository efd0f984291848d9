"""Gumbel-max: one draw from a row of scaled logits.

The drawn token is the one with the largest ``float64(logit) + noise``, ties to the lower id, over all survivors. Tokens
that cannot win whatever is computed for them are skipped; this never changes the result.
"""

from __future__ import annotations

import numpy as np

from headrace.device.sampling.noise import NOISE_MAX, hash_tokens, make_key, make_noise, min_hash_for

_NEAR = 6.0
_SMALL = 512


def draw_token(x: np.ndarray, ids: np.ndarray, seed: int, position: int) -> int:
    """Draw the token for ``position``.

    Args:
        x: float32 ``[V]``, scaled logits.
        ids: the survivors, ascending, at least one and with finite logits at least for one.
    """
    values = x[ids]
    hashes = hash_tokens(make_key(seed, position), ids)
    if len(ids) <= _SMALL:
        return int(ids[np.argmax(values.astype(np.float64) + make_noise(hashes))])
    bound = float(values.max()) - _NEAR
    near = values >= bound
    contenders = np.flatnonzero(near)
    best = float(np.max(values[contenders].astype(np.float64) + make_noise(hashes[contenders])))
    # A token outside ``near`` needs more noise than this to reach the best score found so far.
    needed = best - bound
    if needed <= NOISE_MAX:
        lucky = hashes >= min_hash_for(needed)
        contenders = np.flatnonzero(near | lucky)
    scores = values[contenders].astype(np.float64) + make_noise(hashes[contenders])
    return int(ids[contenders[np.argmax(scores)]])
