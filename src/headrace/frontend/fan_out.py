"""One request with ``n`` answers: its children in the core, and their merged output.

Owns the group from registration to its last output: the core's requests (children), the answers in index order, prompt
logprobs, and which of it the consumer has not taken. The first child alone carries the wish for prompt logprobs, so the
others may use the prefix cache. It knows neither streams nor the core.

A group is over when its last answer has ended; FINAL_ONLY shows nothing before. While prompt logprobs are asked for
and incomplete nothing is shown either, so that they come once, whole, and not after the text.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.frontend.answer import Answer, make_position
from headrace.frontend.detokenizer import split_text
from headrace.frontend.seeds import child_seed
from headrace.frontend.stop_strings import StopAutomaton
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.outputs import RequestTimes
from headrace.messages.request_output import PositionLogprobs, RequestOutput
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import PromptLogprobs, TokenLogprobs
from headrace.messages.sampling_params import RequestOutputKind

HEAVY_ENTRIES = 4096
"""Logprobs beyond this many are made into their final form beside the event loop."""


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return the core's requests: one per answer, each with its own id and seed."""
    sampling = request.sampling
    assert sampling.seed is not None and sampling.max_tokens is not None
    replace = msgspec.structs.replace
    # A request for 0 tokens still needs its prompt computed; the one token that the core then makes is not kept.
    sampling = replace(sampling, n=1, max_tokens=max(1, sampling.max_tokens))
    if request.sampling.n == 1:
        return [replace(request, sampling=sampling)]
    children = []
    for index in range(request.sampling.n):
        wishes = sampling.prompt_logprobs if index == 0 else None
        own = replace(sampling, seed=child_seed(request.sampling.seed or 0, index), prompt_logprobs=wishes)
        children.append(replace(request, request_id=f"{request.request_id}-{index}", sampling=own))
    return children


class RequestGroup:
    """A request as its consumer sees it.

    Args:
        external_id: the caller's id, shown in outputs.
        request: resolved, with ``n`` answers; its id is internal and unique.
        prompt: the text, if the caller gave text.
        tokenizer: for text; ``None`` gives ids only.
        on_news: called when there is something to take.
    """

    __slots__ = (
        "_final_only",
        "_is_delta",
        "_kv_transfer_params",
        "_prompt_entries",
        "_prompt_logprobs",
        "_prompt_logprobs_taken",
        "_prompt_missing",
        "_taken_finished",
        "_times",
        "_tokenizer",
        "answers",
        "arrival",
        "children",
        "external_id",
        "num_live",
        "num_prompt_tokens",
        "on_news",
        "owner",
        "prompt",
        "prompt_token_ids",
        "seed",
    )

    def __init__(
        self,
        external_id: str,
        request: EngineCoreRequest,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        sampling = request.sampling
        self.external_id = external_id
        self.owner = request.owner
        self._tokenizer = tokenizer
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.arrival = request.arrival_time
        self.seed = sampling.seed
        self.on_news = on_news
        self.children = fan_out(request)
        stops = StopAutomaton(sampling.stop) if sampling.stop else None
        most = sampling.max_tokens or 0
        self.answers = [Answer(child, index, tokenizer, stops, most) for index, child in enumerate(self.children)]
        self.num_live = len(self.answers)
        self._final_only = sampling.output_kind is RequestOutputKind.FINAL_ONLY
        self._is_delta = sampling.output_kind is RequestOutputKind.DELTA
        self._taken_finished = False
        self._times: RequestTimes | None = None
        self._kv_transfer_params: dict[str, object] | None = None
        self._prompt_missing = 0 if sampling.prompt_logprobs is None else self.num_prompt_tokens - 1
        self._prompt_entries: list[TokenLogprobs] | None = None if sampling.prompt_logprobs is None else []
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._prompt_logprobs_taken = False

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return self.num_live == 0

    def add_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        """Keep the next positions; positions that came before (after a preemption) are dropped."""
        if self._prompt_entries is None:
            return
        known = 1 + len(self._prompt_entries)
        assert piece.start <= known, (piece.start, known)
        fresh = piece.entries[known - piece.start :]
        self._prompt_entries += fresh
        self._prompt_missing -= len(fresh)

    def note_end(self, times: RequestTimes, kv_transfer_params: dict[str, object] | None) -> None:
        """One answer has ended; keep what came with its end."""
        self.num_live -= 1
        self._times = times
        self._kv_transfer_params = kv_transfer_params or self._kv_transfer_params

    def announce(self) -> None:
        """Wake the consumer if there is something to take."""
        if self.on_news is not None and self._ready():
            self.on_news()

    def _ready(self) -> bool:
        if self._taken_finished:
            return False
        return self.finished or not (self._final_only or self._prompt_missing)

    def take(self) -> RequestOutput | None:
        """Return the merged output of all that is new, or ``None``."""
        if not self._ready():
            return None
        if self._is_delta:
            outputs = [answer.take() for answer in self.answers if answer.has_news]
        else:
            has_news = any(answer.has_news for answer in self.answers)
            outputs = [answer.take() for answer in self.answers] if has_news else []
        if not outputs:
            return None
        self._taken_finished = self.finished
        return RequestOutput(
            request_id=self.external_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._take_prompt_logprobs(),
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.answers[0].num_cached_tokens,
            times=self._times,
            kv_transfer_params=self._kv_transfer_params,
        )

    @property
    def has_heavy_work(self) -> bool:
        """Whether the next `take` should be prepared beside the event loop."""
        entries = self._prompt_entries
        if entries is None or self._prompt_logprobs is not None or not self._ready():
            return False
        return len(entries) * len(entries[0].token_ids if entries else ()) > HEAVY_ENTRIES

    def prepare(self) -> None:
        """The heavy part of `take`, safe in another thread: it reads only what is complete."""
        self._build_prompt_logprobs()

    def _take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """All positions; under DELTA once."""
        if self._prompt_entries is None or self._prompt_logprobs_taken:
            return None
        self._prompt_logprobs_taken = self._is_delta
        return self._build_prompt_logprobs()

    def _build_prompt_logprobs(self) -> list[PositionLogprobs | None]:
        assert self._prompt_entries is not None
        if self._prompt_logprobs is None:
            tokenizer = self._tokenizer
            texts = split_text(tokenizer, self.prompt_token_ids) if tokenizer else [""] * self.num_prompt_tokens
            known = zip(self._prompt_entries, texts[1:], strict=False)
            self._prompt_logprobs = [None, *(make_position(tokenizer, entry, text) for entry, text in known)]
        return self._prompt_logprobs
