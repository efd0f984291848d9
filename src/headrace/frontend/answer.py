"""One answer as it grows: token ids in; text, logprobs and the end out.

Owns the text of one of the ``n`` answers: detokenisation, stop strings, what has been handed out and what has not.
Under DELTA what is handed out is forgotten, so memory is bounded by what the consumer has not taken. It knows neither
streams nor the core.

Order of effects for each message: ids → text → stop strings → kept ids and logprobs → the end. Tokens past a stop
string leave no trace in text, ids or logprobs. The token that ended the answer (EOS or a stop token) is kept among the
ids but not in the text, unless ``include_stop_str_in_output`` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.detokenizer import NullDetokenizer, make_detokenizer
from headrace.frontend.stop_strings import StopAutomaton, StopMatcher
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.outputs import EngineCoreOutput, FinishReason, RequestTimes
from headrace.messages.request_output import CompletionOutput, Logprob, PositionLogprobs
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import TokenLogprobs
from headrace.messages.sampling_params import RequestOutputKind


class Answer:
    """State of one answer.

    Args:
        request: as it went to the core.
        index: of this answer among the ``n``.
        tokenizer: ``None`` when no text is wanted.
        stops: of the request, shared by its answers.
        max_tokens: as asked; 0 keeps none of the tokens that the core makes.
    """

    __slots__ = (
        "_by_token",
        "_detokenizer",
        "_end_taken",
        "_is_delta",
        "_max_tokens",
        "_min_tokens",
        "_new_ids",
        "_new_logprobs",
        "_new_text",
        "_num_taken",
        "_stop_ids",
        "_stops",
        "_tokenizer",
        "_with_stop_text",
        "cumulative_logprob",
        "error",
        "finish_reason",
        "first_token_time",
        "index",
        "last_token_time",
        "num_cached_tokens",
        "num_tokens",
        "request_id",
        "stop_reason",
        "times",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        tokenizer: Tokenizer | None,
        stops: StopAutomaton | None,
        max_tokens: int,
    ) -> None:
        sampling = request.sampling
        self.request_id = request.request_id
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.times: RequestTimes | None = None
        self._num_taken = 0
        self._end_taken = False
        self._tokenizer = tokenizer
        wants_text = tokenizer is not None and sampling.detokenize
        self._detokenizer = (
            make_detokenizer(tokenizer, request.prompt_token_ids, sampling.skip_special_tokens)
            if wants_text
            else NullDetokenizer()
        )
        self._stops = StopMatcher(stops, sampling.include_stop_str_in_output) if stops is not None else None
        self._stop_ids = frozenset(request.eos_token_ids) | frozenset(sampling.stop_token_ids)
        self._with_stop_text = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._max_tokens = max_tokens
        self._is_delta = sampling.output_kind is RequestOutputKind.DELTA
        self._new_ids: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[PositionLogprobs] | None = None if sampling.logprobs is None else []
        self._by_token = self._stops is not None or self._new_logprobs is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something that a consumer has not taken."""
        return self.num_tokens != self._num_taken or (self.finish_reason is not None and not self._end_taken)

    @property
    def is_aborted(self) -> bool:
        """Whether its client ended it."""
        return self.finish_reason is FinishReason.ABORT

    def add(self, output: EngineCoreOutput) -> int:
        """Take the core's news and return how many tokens were kept.

        After it `finish_reason` tells whether the answer has ended; a stop string may end it before the core knows.
        """
        assert self.finish_reason is None, self.request_id
        token_ids = output.new_token_ids
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        self.times = output.times or self.times
        ends = output.finish_reason is FinishReason.STOP
        kept = 0
        if token_ids and self._max_tokens:
            if self._by_token:
                kept = self._add_each(token_ids, output.logprobs, ends)
            else:
                kept = len(token_ids)
                self._new_ids += token_ids
                silent = ends and not self._with_stop_text and token_ids[-1] in self._stop_ids
                text = self._detokenizer.decode(token_ids[:-1] if silent else token_ids)
                if text:
                    self._new_text.append(text)
            self.num_tokens += kept
        if output.finish_reason is not None and self.finish_reason is None:
            self._finish_with(output)
        return kept

    def _add_each(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, ends: bool) -> int:
        """Take tokens one by one, up to the one that completes a stop string."""
        last = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            silent = ends and place == last and not self._with_stop_text and token_id in self._stop_ids
            text = "" if silent else self._detokenizer.decode((token_id,))
            self._new_ids.append(token_id)
            if self._new_logprobs is not None and logprobs is not None:
                self.cumulative_logprob += logprobs[place].logprobs[0]
                self._new_logprobs.append(self._position(logprobs[place], text))
            if self._stops is None:
                if text:
                    self._new_text.append(text)
                continue
            armed = self.num_tokens + place >= self._min_tokens
            self._push(text, armed)
            if self.finish_reason is not None:
                return place + 1
        return last + 1

    def _push(self, text: str, armed: bool) -> None:
        """Send text through the stop strings; a match ends the answer."""
        assert self._stops is not None
        shown = self._stops.push(text, armed) if text else ""
        if shown:
            self._new_text.append(shown)
        if self._stops.matched is not None:
            self.finish(FinishReason.STOP, self._stops.matched)

    def _finish_with(self, output: EngineCoreOutput) -> None:
        """End as the core says, after the text that was still held."""
        reason = output.finish_reason
        assert reason is not None
        if not self._max_tokens and reason is FinishReason.STOP:
            reason = FinishReason.LENGTH
        rest = self._detokenizer.flush()
        if self._stops is not None:
            self._push(rest, self.num_tokens > self._min_tokens)
            if self.finish_reason is not None:
                return
            rest = self._stops.flush()
        if rest:
            self._new_text.append(rest)
        self.error = output.error
        self.finish(reason, output.stop_reason if self._max_tokens else None)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End the answer. Idempotent: the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stop_reason = stop_reason
            self.error = error or self.error

    def abort(self) -> None:
        """End the answer because its client wants no more; held text is shown as it is."""
        if self.finish_reason is not None:
            return
        rest = self._detokenizer.flush()
        if self._stops is not None:
            rest = self._stops.flush() + rest
        if rest:
            self._new_text.append(rest)
        self.finish(FinishReason.ABORT)

    def _position(self, entry: TokenLogprobs, text: str) -> PositionLogprobs:
        return make_position(self._tokenizer, entry, text)

    def take(self) -> CompletionOutput:
        """Return what is new (DELTA) or everything so far."""
        text = "".join(self._new_text)
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self._new_ids if self._is_delta else self._new_ids.copy(),
            logprobs=self._new_logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            error=self.error,
        )
        if self._new_logprobs is not None:
            output.cumulative_logprob = self.cumulative_logprob
            output.logprobs = self._new_logprobs if self._is_delta else self._new_logprobs.copy()
        if self._is_delta:
            self._new_ids = []
            self._new_text = []
            self._new_logprobs = None if self._new_logprobs is None else []
        else:
            self._new_text = [text]
        self._num_taken = self.num_tokens
        self._end_taken = self.finish_reason is not None
        return output


def make_position(tokenizer: Tokenizer | None, entry: TokenLogprobs, text: str) -> PositionLogprobs:
    """Return one position's candidates, the chosen one first.

    Args:
        tokenizer: for the texts of the candidates; ``None`` leaves them out.
        entry: the chosen token, then the best ones in falling order.
        text: of the chosen token in its place; special tokens, which have none, show their name instead.
    """
    token_ids, logprobs = entry.token_ids, entry.logprobs
    chosen = token_ids[0]
    if tokenizer is None:
        position = {chosen: Logprob(logprobs[0], entry.rank)}
        for rank, token_id in enumerate(token_ids[1:], 1):
            position.setdefault(token_id, Logprob(logprobs[rank], rank))
        return position
    shown = tokenizer.token_text(chosen) if chosen in tokenizer.special_token_ids else text
    position = {chosen: Logprob(logprobs[0], entry.rank, shown)}
    for rank, token_id in enumerate(token_ids[1:], 1):
        if token_id != chosen:
            position[token_id] = Logprob(logprobs[rank], rank, tokenizer.token_text(token_id))
    return position
