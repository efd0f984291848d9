"""Work on rows of logits, as the sampler calls it: NumPy here, and native kernels that give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headrace.device.sampling import processors
from headrace.device.sampling.draw import draw_token
from headrace.device.sampling.filters import surviving_ids
from headrace.device.sampling.logprobs import make_token_logprobs
from headrace.messages.runner_output import TokenLogprobs


class Penalties(NamedTuple):
    """Factors of a row; 1, 0 and 0 change nothing."""

    repetition: float
    frequency: float
    presence: float


class Shape(NamedTuple):
    """What a row's distribution is made of before a token is drawn; a temperature above 0."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float


class Draw(NamedTuple):
    """A token to draw from the row ``x``, which is not changed and whose greatest value is ``peak``."""

    x: np.ndarray
    peak: float
    how: Shape
    seed: int
    position: int


class WantedLogprobs(NamedTuple):
    """Arguments of `logprobs.make_token_logprobs`."""

    row: np.ndarray
    token_id: int
    num_logprobs: int


class SamplingKernels(Protocol):
    """Rows are float32 ``[V]``, contiguous; what comes of one depends on no other."""

    def apply_bitmask(self, x: np.ndarray, words: np.ndarray) -> None:
        """See `processors.apply_bitmask`."""
        ...

    def apply_penalties(self, x: np.ndarray, in_prompt: np.ndarray, counts: np.ndarray, by: Penalties) -> None:
        """See `processors.apply_penalties`."""
        ...

    def draw(self, rows: Sequence[Draw]) -> list[int]:
        """Scale each row, so that its greatest value becomes zero, filter it and draw a token."""
        ...

    def token_logprobs(self, rows: Sequence[WantedLogprobs]) -> list[TokenLogprobs]:
        """See `logprobs.make_token_logprobs`."""
        ...


class NumpySampling:
    """The twin of every faster implementation."""

    def apply_bitmask(self, x: np.ndarray, words: np.ndarray) -> None:
        processors.apply_bitmask(x, words)

    def apply_penalties(self, x: np.ndarray, in_prompt: np.ndarray, counts: np.ndarray, by: Penalties) -> None:
        processors.apply_penalties(x, in_prompt, counts, *by)

    def draw(self, rows: Sequence[Draw]) -> list[int]:
        return [_draw(row) for row in rows]

    def token_logprobs(self, rows: Sequence[WantedLogprobs]) -> list[TokenLogprobs]:
        return [make_token_logprobs(*row) for row in rows]


def _draw(row: Draw) -> int:
    how = row.how
    # The peak is taken off first, so that a low temperature cannot overflow.
    x = row.x - np.float32(row.peak)
    x /= np.float32(how.temperature)
    return draw_token(x, surviving_ids(x, how.min_p, how.top_k, how.top_p), row.seed, row.position)
