"""Native work on rows of logits: the bits of `headrace.device.sampling.kernels.NumpySampling`."""

from __future__ import annotations

import numpy as np

from headrace.device.ops.cpu import _native
from headrace.device.sampling.filters import least_of
from headrace.device.sampling.kernels import Penalties, Shape
from headrace.device.sampling.logprobs import make_token_logprobs
from headrace.messages.runner_output import TokenLogprobs


class NativeSampling:
    """See `headrace.device.sampling.kernels.SamplingKernels`.

    Args:
        team: whose instruction set is used; rows are worked on by the calling thread.
    """

    def __init__(self, team: _native.Team) -> None:
        self._team = team

    def apply_bitmask(self, x: np.ndarray, words: np.ndarray) -> None:
        _native.apply_bitmask(self._team, x, words)

    def apply_penalties(self, x: np.ndarray, in_prompt: np.ndarray, counts: np.ndarray, by: Penalties) -> None:
        _native.apply_penalties(self._team, x, in_prompt, counts, *by)

    def draw(self, x: np.ndarray, peak: float, how: Shape, seed: int, position: int) -> int:
        temperature, min_p, top_k, top_p = how
        least = least_of(min_p)
        return _native.draw(self._team, x, peak, temperature, top_k, least, top_p, seed % (1 << 64), position)

    def token_logprobs(self, row: np.ndarray, token_id: int, num_logprobs: int) -> TokenLogprobs:
        if not 0 <= num_logprobs < len(row):
            return make_token_logprobs(row, token_id, num_logprobs)
        return TokenLogprobs(*_native.token_logprobs(self._team, row, token_id, num_logprobs))
