"""Sampling parameters of every request row, as arrays.

Owns what a row needs to be sampled besides its tokens. A row is overwritten as a whole when it gets a new request, so
nothing of the previous one is left. Large per-row state (penalty counts over the vocabulary) exists only for rows that
ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.messages.scheduler_output import NewRequest

NO_LOGPROBS = -2
"""In `SamplingRows.num_logprobs`: none asked (-1 means the whole vocabulary)."""
GREEDY_BELOW = 1e-5
"""Temperatures below this mean arg max: dividing by them would only make infinities."""


class PenaltyCounts:
    """How often the vocabulary's tokens stand in a row's prompt and output.

    The counts cover the output up to an absolute position and follow it in both directions, so that running a step
    again (which rewinds the position) gives the same counts as the first time.
    """

    def __init__(self, prompt: np.ndarray, vocab_size: int) -> None:
        self.in_prompt = np.zeros(vocab_size, dtype=bool)
        self.in_prompt[prompt] = True
        self.counts = np.zeros(vocab_size, dtype=np.int32)
        self._counted_to = len(prompt)

    def move_to(self, tokens: np.ndarray, position: int) -> None:
        """Make ``counts`` cover the output tokens before ``position``; ``tokens`` is the row from position 0."""
        if position > self._counted_to:
            np.add.at(self.counts, tokens[self._counted_to : position], 1)
        elif position < self._counted_to:
            np.subtract.at(self.counts, tokens[position : self._counted_to], 1)
        self._counted_to = position


@dataclass(slots=True)
class RowExtras:
    """What only some requests ask for; ``None`` and empty mean not asked. Ids are unique and inside the vocabulary."""

    allowed: np.ndarray | None
    bias_ids: np.ndarray | None
    bias_values: np.ndarray | None
    min_tokens: int
    end_ids: np.ndarray
    bad_words: tuple[tuple[int, ...], ...]
    penalties: PenaltyCounts | None


class SamplingRows:
    """Parameter arrays, indexed by ``req_idx``.

    Args:
        max_rows: number of rows.
        vocab_size: width of the logits.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int32)
        self.top_p = np.ones(max_rows, dtype=np.float64)
        self.min_p = np.zeros(max_rows, dtype=np.float64)
        self.repetition = np.ones(max_rows, dtype=np.float64)
        self.frequency = np.zeros(max_rows, dtype=np.float64)
        self.presence = np.zeros(max_rows, dtype=np.float64)
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.num_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int32)
        self.num_prompt_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int32)
        self.prompt_logprobs_rows: set[int] = set()
        """Rows that ask for log-probabilities of their prompt."""
        self.plain = [True] * max_rows
        """Arg max of the raw row is the answer: temperature 0 and nothing that changes logits."""
        self.takes_best = [True] * max_rows
        """Plain, and nobody asked for log-probabilities: the best token is all that is needed."""
        self.extras: list[RowExtras | None] = [None] * max_rows

    def set_row(self, row: int, request: NewRequest) -> None:
        """Overwrite a row with a request's parameters."""
        params = request.sampling
        greedy = params.temperature < GREEDY_BELOW
        assert greedy or params.seed is not None, "the edge gives every request a seed"
        self.temperature[row] = 0.0 if greedy else params.temperature
        self.top_k[row] = max(0, params.top_k)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        self.seed[row] = params.seed or 0
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        wanted = params.prompt_logprobs
        self.num_prompt_logprobs[row] = NO_LOGPROBS if wanted is None else wanted
        extras = _make_extras(request, self.vocab_size)
        self.extras[row] = extras
        self.plain[row] = greedy and extras is None
        self.takes_best[row] = self.plain[row] and params.logprobs is None
        if wanted is not None:
            self.prompt_logprobs_rows.add(row)
        else:
            self.prompt_logprobs_rows.discard(row)

    def clear_row(self, row: int) -> None:
        """Release a row's large state."""
        self.extras[row] = None
        self.prompt_logprobs_rows.discard(row)


def _ids_inside(ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Unique ids that have a logit; an end token outside the vocabulary can never be drawn and needs no mask."""
    return np.array(sorted({i for i in ids if 0 <= i < vocab_size}), dtype=np.int64)


def _make_extras(request: NewRequest, vocab_size: int) -> RowExtras | None:
    params = request.sampling
    penalised = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    asked = (
        penalised,
        params.allowed_token_ids is not None,
        params.logit_bias,
        params.min_tokens > 0,
        request.bad_words_token_ids,
    )
    if not any(asked):
        return None
    bias = {i: v for i, v in (params.logit_bias or {}).items() if i < vocab_size}
    prompt = np.asarray(request.token_ids[: request.num_prompt_tokens], dtype=np.int64)
    return RowExtras(
        allowed=None if params.allowed_token_ids is None else _ids_inside(params.allowed_token_ids, vocab_size),
        bias_ids=np.array(list(bias), dtype=np.int64) if bias else None,
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else None,
        min_tokens=params.min_tokens,
        end_ids=_ids_inside((*request.eos_token_ids, *params.stop_token_ids), vocab_size),
        bad_words=tuple(w for w in request.bad_words_token_ids if w and 0 <= w[-1] < vocab_size),
        penalties=PenaltyCounts(prompt, vocab_size) if penalised else None,
    )
