"""Work on one row of logits, as the sampler calls it: NumPy here, and native kernels that give the same bits."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.device.sampling import processors
from headrace.device.sampling.draw import draw_token
from headrace.device.sampling.filters import surviving_ids
from headrace.device.sampling.logprobs import make_token_logprobs
from headrace.messages.runner_output import TokenLogprobs


class SamplingKernels(Protocol):
    """Rows are float32 ``[V]``, contiguous."""

    def apply_bitmask(self, x: np.ndarray, words: np.ndarray) -> None:
        """See `processors.apply_bitmask`."""
        ...

    def apply_penalties(
        self,
        x: np.ndarray,
        in_prompt: np.ndarray,
        counts: np.ndarray,
        repetition: float,
        frequency: float,
        presence: float,
    ) -> None:
        """See `processors.apply_penalties`."""
        ...

    def draw(
        self,
        x: np.ndarray,
        peak: float,
        temperature: float,
        min_p: float,
        top_k: int,
        top_p: float,
        seed: int,
        position: int,
    ) -> int:
        """Scale the row in place, so that ``peak``, its greatest value, becomes zero; filter it and draw a token."""
        ...

    def token_logprobs(self, row: np.ndarray, token_id: int, num_logprobs: int) -> TokenLogprobs:
        """See `logprobs.make_token_logprobs`."""
        ...


class NumpySampling:
    """The twin of every faster implementation."""

    def apply_bitmask(self, x: np.ndarray, words: np.ndarray) -> None:
        processors.apply_bitmask(x, words)

    def apply_penalties(
        self,
        x: np.ndarray,
        in_prompt: np.ndarray,
        counts: np.ndarray,
        repetition: float,
        frequency: float,
        presence: float,
    ) -> None:
        processors.apply_penalties(x, in_prompt, counts, repetition, frequency, presence)

    def draw(
        self,
        x: np.ndarray,
        peak: float,
        temperature: float,
        min_p: float,
        top_k: int,
        top_p: float,
        seed: int,
        position: int,
    ) -> int:
        # The peak is taken off first, so that a low temperature cannot overflow.
        x -= np.float32(peak)
        x /= np.float32(temperature)
        return draw_token(x, surviving_ids(x, min_p, top_k, top_p), seed, position)

    def token_logprobs(self, row: np.ndarray, token_id: int, num_logprobs: int) -> TokenLogprobs:
        return make_token_logprobs(row, token_id, num_logprobs)
