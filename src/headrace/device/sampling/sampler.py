"""Turns rows of logits into tokens.

Order per row: grammar mask, allowed ids, bias, min_tokens, penalties (repetition, then frequency and presence), bad
words, temperature, min_p, top-k, top-p, Gumbel-max; temperature 0 takes the arg max after bad words.
Log-probabilities are of the raw row, before the mask. Ties break to the lower id.

Every row is worked on alone, several side by side, so its result does not depend on its batch mates;
rows that ask for nothing take the best token of the head and need no logits. A row that fails (non-finite logits,
nothing left to choose from, any exception) gets an error and no token; the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from headrace.base.logging import get_logger
from headrace.device.sampling import processors
from headrace.device.sampling.kernels import Draw, Penalties, SamplingKernels, Shape, WantedLogprobs
from headrace.device.sampling.rows import NO_LOGPROBS, RowExtras, SamplingRows
from headrace.messages.runner_output import NO_TOKEN_LEFT, NON_FINITE, TokenLogprobs

logger = get_logger(__name__)
T = TypeVar("T")
R = TypeVar("R")

NO_TOKEN = -1


class RowError(Exception):
    """A row that cannot be sampled; the message is the cause that the client sees."""


@dataclass(slots=True)
class HeadOutput:
    """What the head tells of some rows; valid until the next forward.

    Attributes:
        best: the id of each row's greatest logit, the lowest of equals.
        peaks: its value; not finite when one of the row's logits is NaN or infinite.
        logits: float32 ``[R, V]`` of the last rows; those before them asked for nothing but their best.
    """

    best: list[int]
    peaks: list[float]
    logits: np.ndarray

    @classmethod
    def of_logits(cls, logits: np.ndarray) -> HeadOutput:
        """All rows in full. An arg max lands on NaN or infinity if there is one."""
        best = logits.argmax(axis=1)
        return cls(best.tolist(), logits[np.arange(len(logits)), best].tolist(), logits)


@dataclass(slots=True)
class SamplingMetadata:
    """The rows of a step that are sampled, in the order of their logits.

    Attributes:
        req_idx: the request's row.
        positions: absolute position at which the new token will stand.
        bitmasks: int32 words per place, for rows under a grammar.
    """

    req_idx: list[int]
    positions: list[int]
    bitmasks: dict[int, np.ndarray] = field(default_factory=dict)

    def slice(self, first: int, end: int) -> SamplingMetadata:
        """Some of the places."""
        masks = {place - first: words for place, words in self.bitmasks.items() if first <= place < end}
        return SamplingMetadata(self.req_idx[first:end], self.positions[first:end], masks)


@dataclass(slots=True)
class SamplerOutput:
    """Token per place (`NO_TOKEN` where the row failed), log-probabilities and errors by place."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def fail(self, place: int, error: Exception) -> None:
        """A row is a request's border: whatever it raises ends this request alone."""
        if not isinstance(error, RowError):
            logger.error("sampling a row failed", exc_info=error)
        self.token_ids[place] = NO_TOKEN
        told = str(error) if isinstance(error, RowError) else f"sampling failed: {type(error).__name__}: {error}"
        self.errors[place] = told

    def extend(self, part: SamplerOutput) -> None:
        """Take over the next places."""
        first = len(self.token_ids)
        self.token_ids += part.token_ids
        self.logprobs.update((first + place, entry) for place, entry in part.logprobs.items())
        self.errors.update((first + place, error) for place, error in part.errors.items())


class Sampler:
    """Samples rows whose parameters stand in `SamplingRows` and whose tokens stand in ``token_ids``.

    Args:
        rows: parameters by ``req_idx``.
        token_ids: int32 ``[max_rows, width]``, known tokens of each row from position 0.
        num_prompt: int array, prompt length of each row.
        kernels: work on a row.
    """

    def __init__(
        self, rows: SamplingRows, token_ids: np.ndarray, num_prompt: np.ndarray, kernels: SamplingKernels
    ) -> None:
        self._kernels = kernels
        self._rows = rows
        self._token_ids = token_ids
        self._num_prompt = num_prompt
        self._scratch: list[np.ndarray] = []
        """One for each changed row that waits for its draw."""

    def sample(self, head: HeadOutput, meta: SamplingMetadata) -> SamplerOutput:
        """Sample every row of ``head`` (not changed); rows without logits take their best."""
        output = SamplerOutput(list(head.best))
        for place, peak in enumerate(head.peaks):
            if not math.isfinite(peak):
                output.token_ids[place] = NO_TOKEN
                output.errors[place] = NON_FINITE
        if not len(head.logits):
            return output
        first = len(head.best) - len(head.logits)
        draws: dict[int, Draw] = {}
        for place, row in enumerate(head.logits, first):
            if place in output.errors:
                continue
            try:
                chosen = self._choose(row, head.best[place], head.peaks[place], place, meta, len(draws))
            except Exception as error:  # noqa: BLE001 - a row is a request's border
                output.fail(place, error)
            else:
                if isinstance(chosen, Draw):
                    draws[place] = chosen
                else:
                    output.token_ids[place] = chosen
        for place, token in _do_rows(draws, self._kernels.draw, output).items():
            output.token_ids[place] = token
        wanted = {}
        for place, row in enumerate(head.logits, first):
            count = int(self._rows.num_logprobs[meta.req_idx[place]])
            if count != NO_LOGPROBS and place not in output.errors:
                wanted[place] = WantedLogprobs(row, output.token_ids[place], count)
        output.logprobs = _do_rows(wanted, self._kernels.token_logprobs, output)
        return output

    def _choose(
        self, row: np.ndarray, best: int, peak: float, place: int, meta: SamplingMetadata, num_draws: int
    ) -> int | Draw:
        """The row's token, or what it is to be drawn from."""
        index, position = meta.req_idx[place], meta.positions[place]
        extras = self._rows.extras[index]
        if extras is not None or place in meta.bitmasks:
            # Memory that nobody touches costs nothing: the scratch rows of unchanged rows.
            while len(self._scratch) <= num_draws:
                self._scratch.append(np.empty(self._rows.vocab_size, dtype=np.float32))
            x = self._scratch[num_draws]
            np.copyto(x, row)
            if place in meta.bitmasks:
                self._kernels.apply_bitmask(x, meta.bitmasks[place])
            if extras is not None:
                self._apply_extras(x, extras, index, position)
            row, best = x, int(x.argmax())
            peak = float(x[best])
        if peak == -math.inf:
            raise RowError(NO_TOKEN_LEFT)
        rows = self._rows
        # A repetition penalty near zero overflows: what is infinite has all the probability.
        if rows.temperature[index] == 0.0 or peak == math.inf:
            return best
        how = Shape(
            float(rows.temperature[index]), float(rows.min_p[index]), int(rows.top_k[index]), float(rows.top_p[index])
        )
        return Draw(row, peak, how, int(rows.seed[index]), position)

    def _apply_extras(self, x: np.ndarray, extras: RowExtras, index: int, position: int) -> None:
        tokens = self._token_ids[index]
        num_prompt = int(self._num_prompt[index])
        if extras.allowed is not None:
            processors.apply_allowed(x, extras.allowed)
        if extras.bias_ids is not None and extras.bias_values is not None:
            processors.apply_bias(x, extras.bias_ids, extras.bias_values)
        if position - num_prompt < extras.min_tokens:
            processors.apply_forbidden(x, extras.end_ids)
        if extras.penalties is not None:
            extras.penalties.move_to(tokens, position)
            rows = self._rows
            by = Penalties(float(rows.repetition[index]), float(rows.frequency[index]), float(rows.presence[index]))
            self._kernels.apply_penalties(x, extras.penalties.in_prompt, extras.penalties.counts, by)
        if extras.bad_words:
            processors.apply_bad_words(x, extras.bad_words, tokens[num_prompt:position])


def _do_rows(rows: dict[int, T], work: Callable[[list[T]], list[R]], output: SamplerOutput) -> dict[int, R]:
    """Do the work of all rows at once; should that fail, one by one, so that it fails for its culprit alone."""
    if not rows:
        return {}
    try:
        return dict(zip(rows, work(list(rows.values())), strict=True))
    except Exception:
        logger.warning("sampling %d rows at once failed", len(rows), exc_info=True)
    done: dict[int, R] = {}
    for place, row in rows.items():
        try:
            (done[place],) = work([row])
        except Exception as error:  # noqa: BLE001 - a row is a request's border
            output.fail(place, error)
    return done
