"""Native work on rows of logits: the bits of `headrace.device.sampling.kernels.NumpySampling`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.device.ops.cpu import _native
from headrace.device.sampling.filters import least_of
from headrace.device.sampling.kernels import Draw, Penalties, WantedLogprobs
from headrace.device.sampling.logprobs import make_token_logprobs
from headrace.messages.runner_output import TokenLogprobs


class NativeSampling:
    """See `headrace.device.sampling.kernels.SamplingKernels`.

    Args:
        team: several rows are worked on side by side.
    """

    def __init__(self, team: _native.Team) -> None:
        self._team = team

    def apply_bitmask(self, x: np.ndarray, words: np.ndarray) -> None:
        _native.apply_bitmask(self._team, x, words)

    def apply_penalties(self, x: np.ndarray, in_prompt: np.ndarray, counts: np.ndarray, by: Penalties) -> None:
        _native.apply_penalties(self._team, x, in_prompt, counts, *by)

    def draw(self, rows: Sequence[Draw]) -> list[int]:
        return _native.draw(
            self._team,
            [
                (x, peak, how.temperature, how.top_k, least_of(how.min_p), how.top_p, seed % (1 << 64), position)
                for x, peak, how, seed, position in rows
            ],
        )

    def token_logprobs(self, rows: Sequence[WantedLogprobs]) -> list[TokenLogprobs]:
        if any(not 0 <= wanted.num_logprobs < len(wanted.row) for wanted in rows):
            # The whole vocabulary.
            return [make_token_logprobs(*row) for row in rows]
        return [TokenLogprobs(*entry) for entry in _native.token_logprobs(self._team, list(rows))]
