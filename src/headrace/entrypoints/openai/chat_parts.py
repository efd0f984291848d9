"""The parts of a chat answer beside plain content: what a request asks to be told apart, and how it is written out.

One `AnswerParts` serves a request, streamed or not: it makes a parser for each choice and turns what the parsers find
into messages and deltas.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from headrace.entrypoints.openai.context import ServerContext
from headrace.frontend.detokenizer import split_text
from headrace.frontend.parsers.answer_parser import AnswerParser
from headrace.frontend.parsers.events import CallDelta, ParsedDelta, ToolParser
from headrace.frontend.parsers.json_lists import ArrayParser, NamedParser
from headrace.frontend.parsers.reasoning import ReasoningParser
from headrace.frontend.tools import ToolPlan
from headrace.messages.request_output import CompletionOutput
from headrace.messages.sampling_params import SamplingParams


@dataclass
class AnswerParts:
    """See the module.

    Args:
        context: of the server.
        plan: what the request wants with tools.
        prompt: the text that is answered.
        show_reasoning: whether the client gets the reasoning.
    """

    context: ServerContext
    plan: ToolPlan
    prompt: str
    show_reasoning: bool
    _skip_special_tokens: bool = True
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)

    @property
    def needed(self) -> bool:
        """Whether answers have to be looked through at all."""
        return self.context.reasoning_format is not None or self.plan.mode != "none"

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all choices so far; ``None`` when reasoning is not told apart."""
        if self.context.reasoning_format is None:
            return None
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())

    @property
    def hidden_token_ids(self) -> frozenset[int]:
        """Tokens that have no text in the answer; known after `adapt`."""
        return self.context.tokenizer.special_token_ids if self._skip_special_tokens else frozenset()

    def adapt(self, sampling: SamplingParams, *, explicit: bool) -> SamplingParams:
        """Return the sampling under which the parsers see what they need.

        Marks that are special tokens have to stay in the text, unless the client decided on that, and a constraint
        begins after the reasoning.
        """
        form, constraint = self.context.reasoning_format, sampling.structured_outputs
        if constraint is not None and form is not None:
            constraint = replace(constraint, reasoning=form.span(self.prompt))
        marks = [*((form.start, form.end) if form is not None else ())]
        if self.plan.mode == "auto":
            marks += self.context.tool_format.marks
        tokenizer = self.context.tokenizer
        special = any(tokenizer.id_of(mark) in tokenizer.special_token_ids for mark in marks)
        skip = sampling.skip_special_tokens if explicit or not special else False
        self._skip_special_tokens = skip
        return replace(sampling, structured_outputs=constraint, skip_special_tokens=skip)

    def parse(self, one: CompletionOutput) -> ParsedDelta:
        """What became certain with this piece of a choice."""
        if one.index not in self._parsers:
            self._parsers[one.index] = self._make_parser()
        delta = self._parsers[one.index].feed(one.text, one.token_ids, one.finish_reason is not None)
        if not self.show_reasoning:
            delta.reasoning = ""
        return delta

    def finish_reason(self, one: CompletionOutput) -> str | None:
        """``tool_calls`` for an answer that ended by itself with calls that the model decided on."""
        parser = self._parsers.get(one.index)
        called = parser is not None and parser.num_calls > 0 and self.plan.mode in ("auto", "required")
        return "tool_calls" if one.finish_reason == "stop" and called else one.finish_reason

    def _make_parser(self) -> AnswerParser:
        form = self.context.reasoning_format
        reasoning = ReasoningParser(form, self.prompt) if form is not None else None
        tokenizer, skip = self.context.tokenizer, self._skip_special_tokens
        return AnswerParser(
            reasoning, self._make_tool_parser(), self.plan.parallel, lambda ids: split_text(tokenizer, ids, skip)
        )

    def _make_tool_parser(self) -> ToolParser | None:
        match self.plan.mode:
            case "none":
                return None
            case "named":
                return NamedParser(self.plan.name)
            case "required":
                return ArrayParser(self.plan.tools)
            case _:
                return self.context.tool_format.make(self.plan.tools)


def message_of(delta: ParsedDelta) -> dict[str, Any]:
    """A whole answer as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if delta.calls:
        message["content"] = delta.content or None
        message["tool_calls"] = [_call(call, with_index=False) for call in delta.calls]
    if delta.reasoning:
        message["reasoning"] = message["reasoning_content"] = delta.reasoning
    return message


def delta_of(delta: ParsedDelta) -> dict[str, Any]:
    """A piece of an answer as a delta."""
    shown: dict[str, Any] = {}
    if delta.reasoning:
        shown["reasoning"] = shown["reasoning_content"] = delta.reasoning
    if delta.content:
        shown["content"] = delta.content
    if delta.calls:
        shown["tool_calls"] = [_call(call, with_index=True) for call in delta.calls]
    return shown


def _call(call: CallDelta, with_index: bool) -> dict[str, Any]:
    """One call; its id, type and name stand where it begins."""
    shown: dict[str, Any] = {"index": call.index} if with_index else {}
    function: dict[str, Any] = {}
    if call.name is not None:
        shown |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        function["name"] = call.name
    function["arguments"] = call.arguments
    return {**shown, "function": function}
