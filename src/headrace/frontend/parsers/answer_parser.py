"""One chat answer's text, whole or in pieces, to reasoning, content and tool calls.

First the reasoning is split off, then calls are looked for in the rest. Owns the count of reasoning tokens: a token
belongs to the reasoning when its text begins there, so the count does not depend on the cuts either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.frontend.parsers.events import ParsedDelta, ToolParser
from headrace.frontend.parsers.reasoning import ReasoningParser

Split = Callable[[Sequence[int]], list[str]]


class AnswerParser:
    """See the module.

    Args:
        reasoning: ``None`` when there is none to look for.
        tools: ``None`` when no calls are to be looked for.
        parallel: whether more than the first call counts.
        split: gives the text of each of some tokens.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, parallel: bool, split: Split
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._split = split
        self._reasoning_ids: list[int] = []
        self._num_reasoning: int | None = None if reasoning is not None else 0
        self.num_calls = 0

    def feed(self, text: str, token_ids: Sequence[int], final: bool) -> ParsedDelta:
        """Take a piece and return what became certain.

        Args:
            text: the piece.
            token_ids: that it was made of, for the count.
            final: whether the answer ends with it.
        """
        if self._num_reasoning is None:
            self._reasoning_ids += token_ids
        thoughts, content = self._split_off(text, final)
        delta = self._find_calls(content, final)
        delta.reasoning = thoughts
        self.num_calls += sum(call.name is not None for call in delta.calls)
        return delta

    def _split_off(self, text: str, final: bool) -> tuple[str, str]:
        parser = self._reasoning
        if parser is None:
            return "", text
        thoughts, content = parser.feed(text)
        if final:
            more, rest = parser.finish()
            thoughts, content = thoughts + more, content + rest
        if self._num_reasoning is None and parser.ended:
            self._num_reasoning = self._count()
            self._reasoning_ids = []
        return thoughts, content

    def _find_calls(self, content: str, final: bool) -> ParsedDelta:
        if self._tools is None:
            return ParsedDelta(content)
        delta = self._tools.feed(content)
        if final:
            rest = self._tools.finish()
            delta.content += rest.content
            for call in rest.calls:
                last = delta.calls[-1] if delta.calls else None
                if last is not None and last.index == call.index and call.name is None:
                    last.arguments += call.arguments
                else:
                    delta.calls.append(call)
        if not self._parallel:
            delta.calls = [call for call in delta.calls if call.index == 0]
        return delta

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its marks included; all there are while it has not ended."""
        return len(self._reasoning_ids) if self._num_reasoning is None else self._num_reasoning

    def _count(self) -> int:
        assert self._reasoning is not None
        place = 0
        for count, text in enumerate(self._split(self._reasoning_ids)):
            if place >= self._reasoning.num_chars:
                return count
            place += len(text)
        return len(self._reasoning_ids)
