"""Cuts an answer's text at its tokens, so that parsers tell which token went where, however the text arrives."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

from headrace.messages.request_output import CompletionOutput, PositionLogprobs


class TokenCutter:
    """For one answer with logprobs, which hold the text of each token.

    Text may lag behind its tokens (it may become a stop string), so a token waits until its text has come.

    Args:
        hidden: tokens that have no text in the answer.
    """

    def __init__(self, hidden: Collection[int]) -> None:
        self._hidden = hidden
        self._text = ""
        self._waiting: deque[PositionLogprobs] = deque()

    def cut(self, one: CompletionOutput) -> Iterator[CompletionOutput]:
        """Take news and yield it in pieces of at most one token; the last of all has the end and what text remains."""
        self._text += one.text
        self._waiting += one.logprobs or ()
        final = one.finish_reason is not None
        while self._waiting:
            token_id, entry = next(iter(self._waiting[0].items()))
            size = 0 if token_id in self._hidden else len(entry.decoded_token or "")
            if size > len(self._text) and not final:
                return
            text, self._text = self._text[:size], self._text[size:]
            position = self._waiting.popleft()
            yield replace(one, text=text, token_ids=[token_id], logprobs=[position], finish_reason=None)
        if final:
            text, self._text = self._text, ""
            yield replace(one, text=text, token_ids=[], logprobs=[])
