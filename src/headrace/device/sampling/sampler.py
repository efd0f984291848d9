"""Turns rows of logits into tokens, one row at a time.

Order per row: grammar mask, allowed ids, bias, min_tokens, penalties (repetition, then frequency and presence), bad
words, temperature, min_p, top-k, top-p, Gumbel-max; temperature 0 takes the arg max after bad words.
Log-probabilities are of the raw row, before the mask. Ties break to the lower id.

Every row is worked on alone, in a scratch row at a fixed address, so its result does not depend on its batch mates;
rows that ask for nothing take the best token of the head and need no logits. A row that fails (non-finite logits,
nothing left to choose from, any exception) gets an error and no token; the others go on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.base.logging import get_logger
from headrace.device.sampling import processors
from headrace.device.sampling.kernels import Penalties, SamplingKernels, Shape
from headrace.device.sampling.rows import NO_LOGPROBS, RowExtras, SamplingRows
from headrace.messages.runner_output import NO_TOKEN_LEFT, NON_FINITE, TokenLogprobs

logger = get_logger(__name__)

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


@dataclass(frozen=True, slots=True)
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
        self._scratch = np.empty(rows.vocab_size, dtype=np.float32)

    def sample(self, head: HeadOutput, meta: SamplingMetadata) -> SamplerOutput:
        """Sample every row of ``head`` (not changed); rows without logits take their best."""
        output = SamplerOutput(list(head.best))
        for place, peak in enumerate(head.peaks):
            if not math.isfinite(peak):
                output.token_ids[place] = NO_TOKEN
                output.errors[place] = NON_FINITE
        first = len(head.best) - len(head.logits)
        for place, row in enumerate(head.logits, first):
            if place in output.errors:
                continue
            output.token_ids[place] = NO_TOKEN
            try:
                token = self._choose(row, head.best[place], place, meta)
                wanted = int(self._rows.num_logprobs[meta.req_idx[place]])
                if wanted != NO_LOGPROBS:
                    output.logprobs[place] = self._kernels.token_logprobs(row, token, wanted)
                output.token_ids[place] = token
            except RowError as error:
                output.errors[place] = str(error)
            except Exception as error:  # A row is a request's border: whatever it raises ends this request alone.
                logger.exception("sampling a row failed")
                output.errors[place] = f"sampling failed: {type(error).__name__}: {error}"
        return output

    def _choose(self, row: np.ndarray, best: int, place: int, meta: SamplingMetadata) -> int:
        index, position = meta.req_idx[place], meta.positions[place]
        if self._rows.plain[index] and place not in meta.bitmasks:
            return best
        x = self._scratch
        np.copyto(x, row)
        if place in meta.bitmasks:
            self._kernels.apply_bitmask(x, meta.bitmasks[place])
        extras = self._rows.extras[index]
        if extras is not None:
            self._apply_extras(x, extras, index, position)
        best = int(x.argmax())
        if x[best] == -np.inf:
            raise RowError(NO_TOKEN_LEFT)
        # A repetition penalty near zero overflows: what is infinite has all the probability.
        if self._rows.temperature[index] == 0.0 or x[best] == np.inf:
            return best
        return self._draw(x, float(x[best]), index, position)

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

    def _draw(self, x: np.ndarray, peak: float, index: int, position: int) -> int:
        rows = self._rows
        how = Shape(
            float(rows.temperature[index]), float(rows.min_p[index]), int(rows.top_k[index]), float(rows.top_p[index])
        )
        return self._kernels.draw(x, peak, how, int(rows.seed[index]), position)
