"""The steps that change a row of logits before a token is drawn, in the order in which the sampler applies them.

Each works in place on one float32 row ``[V]``, so that no result can depend on another row of the batch. ``-inf``
forbids a token; nothing later in the order brings it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FORBIDDEN = np.float32(-np.inf)


def apply_bitmask(x: np.ndarray, words: np.ndarray) -> None:
    """Forbid tokens whose bit (lowest first) in the int32 ``words`` is not set."""
    if len(words) * 32 < len(x):
        raise ValueError(f"a grammar bitmask of {len(words)} words cannot cover {len(x)} tokens")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(x))
    x[bits == 0] = _FORBIDDEN


def apply_allowed(x: np.ndarray, allowed: np.ndarray) -> None:
    """Forbid everything but ``allowed``."""
    kept = x[allowed]
    x.fill(_FORBIDDEN)
    x[allowed] = kept


def apply_bias(x: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    """Add ``values`` (float32) to the logits of ``ids`` (unique)."""
    x[ids] += values


def apply_penalties(
    x: np.ndarray, in_prompt: np.ndarray, counts: np.ndarray, repetition: float, frequency: float, presence: float
) -> None:
    """Repetition over prompt and output, then frequency and presence over the output.

    Args:
        in_prompt: bool ``[V]``.
        counts: int32 ``[V]``, how often the output holds a token.
    """
    if repetition != 1.0:
        seen = np.flatnonzero(in_prompt | (counts > 0))
        values = x[seen]
        factor = np.float32(repetition)
        x[seen] = np.where(values > 0, values / factor, values * factor)
    if frequency != 0.0 or presence != 0.0:
        made = np.flatnonzero(counts)
        x[made] -= np.float32(frequency) * counts[made].astype(np.float32) + np.float32(presence)


def apply_bad_words(x: np.ndarray, words: Sequence[tuple[int, ...]], output: np.ndarray) -> None:
    """Forbid the last token of each word whose other tokens end the output so far."""
    for word in words:
        head = word[:-1]
        if len(head) <= len(output) and tuple(output[len(output) - len(head) :].tolist()) == head:
            x[word[-1]] = _FORBIDDEN


def apply_forbidden(x: np.ndarray, ids: np.ndarray) -> None:
    """Forbid ``ids`` (end tokens while ``min_tokens`` is not reached)."""
    x[ids] = _FORBIDDEN
