"""Which tokens survive min-p, top-k and top-p, without sorting the vocabulary.

All functions take one row of float32 logits and treat ``-inf`` as forbidden. Results are exact: they equal those of a
full stable sort, whatever shortcut found them. Ties go to the lower id.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.device.sampling.weights import weigh

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


def select_top_p(values: np.ndarray, top_p: float) -> np.ndarray:
    """Indices, ascending, of the shortest best-first prefix of ``values`` whose probability reaches ``top_p``.

    Probabilities are those among ``values``. At least one index survives, and none whose value is ``-inf``.
    """
    weights = weigh(values, values.max())
    target = top_p * float(weights.sum())
    size = _FIRST_GUESS
    while True:
        best = top_k_ids(values, min(size, len(values)))
        mass = np.cumsum(weights[best]).astype(np.float64)
        if mass[-1] >= target or len(best) < size:
            keep = int(np.searchsorted(mass, target, side="left")) + 1
            return np.sort(best[:keep])
        size *= 8


def least_of(min_p: float) -> float:
    """What a logit must reach, the greatest one being zero, to have ``min_p`` times its probability."""
    return float(np.float32(np.log(min_p))) if min_p > 0 else -math.inf


def surviving_ids(x: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray | None:
    """Ids that may be drawn from the row ``x``, scaled so that its greatest value is zero, ascending.

    ``None`` when no filter is on.

    min_p keeps tokens with at least ``min_p`` times the best token's probability; top_k and top_p follow in this order,
    each on what the one before has left. A filter that is off is skipped.
    """
    ids: np.ndarray | None = None
    if 0 < top_k < len(x):
        # The tokens that min_p keeps are the best ones, so taking the top k first leaves the same set.
        ids = select_top_k(x, top_k)
    if min_p > 0:
        values = x if ids is None else x[ids]
        kept = np.flatnonzero(values >= np.float32(least_of(min_p)))
        ids = kept if ids is None else ids[kept]
    if top_p < 1:
        kept = select_top_p(x if ids is None else x[ids], top_p)
        ids = kept if ids is None else ids[kept]
    return ids
