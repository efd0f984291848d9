"""Log-probabilities of a raw row: the softmax over the whole vocabulary before anything of the request changed it."""

from __future__ import annotations

import numpy as np

from headrace.device.sampling.filters import top_k_ids
from headrace.device.sampling.noise import log_of
from headrace.device.sampling.weights import ONE, weigh
from headrace.messages.runner_output import TokenLogprobs


def make_token_logprobs(row: np.ndarray, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """The token's entry and the ``num_logprobs`` best ones (-1: the whole vocabulary), ties to the lower id.

    Args:
        row: float32 ``[V]``, raw logits; not changed.
    """
    peak = row.max()
    total = np.array([float(weigh(row, peak).sum()) / ONE])
    log_sum = float(peak) + float(log_of(total)[0])
    value = row[token_id]
    rank = 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))
    if num_logprobs == 0:
        return TokenLogprobs([token_id], [float(value) - log_sum], rank)
    if num_logprobs < 0 or num_logprobs >= len(row):
        best = np.argsort(-row, kind="stable")
    else:
        best = top_k_ids(row, num_logprobs)
    values = row[best].astype(np.float64) - log_sum
    return TokenLogprobs([token_id, *best.tolist()], [float(value) - log_sum, *values.tolist()], rank)
