"""Which tokens survive min-p, top-k and top-p, without sorting the vocabulary.

All functions take one row of float32 logits and treat ``-inf`` as forbidden. Results are exact: they equal those of a
full stable sort, whatever shortcut found them. Ties go to the lower id.
"""

from __future__ import annotations

import numpy as np

_LANES = 64
_FIRST_GUESS = 64


def top_k_ids(x: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest values, best first, ties by id; fewer when fewer are finite."""
    ids = select_top_k(x, k)
    return ids[np.argsort(-x[ids], kind="stable")]


def select_top_k(x: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest finite values in ascending id order."""
    candidates = np.flatnonzero(x >= _lower_bound(x, k)) if k * 4 < len(x) else np.arange(len(x))
    values = x[candidates]
    if len(candidates) > k:
        kth = np.partition(values, len(values) - k)[len(values) - k]
        above = values > kth
        equal = np.flatnonzero(values == kth)[: k - int(np.count_nonzero(above))]
        above[equal] = True
        candidates, values = candidates[above], values[above]
    finite: np.ndarray = candidates[values > -np.inf]
    return finite


def _lower_bound(x: np.ndarray, k: int) -> float:
    """A value that at least ``k`` entries reach: the k-th largest maximum of disjoint lanes."""
    width = len(x) // _LANES
    if k > width:
        return float(np.partition(x, len(x) - k)[len(x) - k])
    maxima = x[: width * _LANES].reshape(_LANES, width).max(axis=0)
    return float(np.partition(maxima, width - k)[width - k])


def select_top_p(x: np.ndarray, ids: np.ndarray, top_p: float) -> np.ndarray:
    """Of ``ids`` (ascending), the shortest best-first prefix whose probability reaches ``top_p``; ascending again.

    Probabilities are those among ``ids``. At least one id survives.
    """
    values = x[ids]
    weights = np.exp(values - values.max()).astype(np.float64)
    target = top_p * float(weights.sum())
    size = _FIRST_GUESS
    while True:
        size = min(size, len(ids))
        best = top_k_ids(values, size) if size < len(ids) else np.argsort(-values, kind="stable")
        mass = np.cumsum(weights[best])
        if mass[-1] >= target or size == len(ids):
            keep = int(np.searchsorted(mass, target, side="left")) + 1
            kept: np.ndarray = ids[np.sort(best[:keep])]
            return kept
        size *= 8


def surviving_ids(x: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray | None:
    """Ids that may be drawn from the scaled row ``x``, ascending; ``None`` when no filter is on.

    min_p keeps tokens with at least ``min_p`` times the best token's probability; top_k and top_p follow in this order,
    each on what the one before has left. A filter that is off is skipped.
    """
    limit_k = 0 < top_k < len(x)
    if min_p <= 0 and not limit_k and top_p >= 1:
        return None
    if limit_k:
        # The tokens that min_p keeps are the best ones, so taking the top k first leaves the same set.
        ids = select_top_k(x, top_k)
    else:
        ids = np.flatnonzero(x > -np.inf)
    if min_p > 0:
        values = x[ids]
        ids = ids[values >= values.max() + np.float32(np.log(min_p))]
    return ids if top_p >= 1 else select_top_p(x, ids, top_p)
