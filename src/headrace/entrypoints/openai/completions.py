"""``/v1/completions``: text or tokens in, text out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.constraints import read_constraint
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.generation import UsageCounter, Work, check_output
from headrace.entrypoints.openai.logprobs import CompletionLogprobs, prompt_logprobs_json
from headrace.entrypoints.openai.protocol import CompletionRequest
from headrace.entrypoints.openai.refusals import check_refusals
from headrace.entrypoints.openai.sampling import check_stream_fields, make_sampling
from headrace.entrypoints.openai.sse import ChunkTemplate, event
from headrace.frontend.validation import check_num_prompts
from headrace.messages.request_output import CompletionOutput, PositionLogprobs, RequestOutput

DEFAULT_MAX_TOKENS = 16
_MARK = "\x00text\x00"


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a body: one text, one list of ids, a list of texts or a list of lists of ids.

    Raises:
        InvalidRequestError: empty, or kinds mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise InvalidRequestError("prompt must hold texts or token ids, not both", param="prompt")
    return prompt


def check_completion(body: CompletionRequest) -> None:
    """Refuse contradictions that need no model."""
    check_refusals(body, skip=frozenset({"echo"}))
    check_stream_fields(body)
    n = body.n if body.n is not None else 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequestError("best_of must equal n: choosing among more answers is not supported", param="best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")


@dataclass(slots=True)
class _Choice:
    """State of one choice while it streams."""

    template: ChunkTemplate
    logprobs: CompletionLogprobs
    started: bool = False


@dataclass
class CompletionCall:
    """One request of this route, from its checked body to its answer."""

    context: ServerContext
    body: CompletionRequest
    answer_id: str
    model: str
    work: Work
    created: int = field(default_factory=lambda: int(time.time()))
    counter: UsageCounter = field(default_factory=UsageCounter)
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _finals: dict[int, RequestOutput] = field(default_factory=dict)
    _prompt_logprobs: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)

    @classmethod
    async def prepare(cls, context: ServerContext, body: CompletionRequest, request_id: str) -> CompletionCall:
        """Check everything and tokenise; nothing is queued yet."""
        check_completion(body)
        model = context.check_model(body.model)
        scored = body.logprobs if body.echo and body.logprobs is not None else None
        constraint = read_constraint(body)
        sampling = make_sampling(
            body,
            context.sampling_defaults,
            context.llm.input.limits.most,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=scored,
            constraint=constraint.params if constraint is not None else None,
        )
        if constraint is not None:
            sampling = await context.llm.check_constraint(sampling, constraint.param)
        special = body.add_special_tokens is not False
        given = split_prompts(body.prompt)
        check_num_prompts(len(given), sampling.n, context.llm.input.limits)
        prompts = await context.llm.tokenize_all(given, special)
        answer_id = f"cmpl-{request_id}"
        counter = UsageCounter(bool(body.return_timing))
        return cls(context, body, answer_id, model, Work(answer_id, prompts, sampling, body), counter=counter)

    @property
    def _n(self) -> int:
        return self.body.n or 1

    async def collect(self) -> None:
        """Wait for all outputs."""
        async for index, output in self.work.run(self.context):
            self._finals[index] = output

    def build(self) -> dict[str, Any]:
        """The whole answer from what was collected, choices in prompt order."""
        choices = []
        for index, output in sorted(self._finals.items()):
            for one in output.outputs:
                check_output(one)
                self.counter.add(index, output, len(one.token_ids))
                choices.append(self._full_choice(index, output, one))
        return {
            **self._head(),
            "choices": choices,
            "usage": self.counter.usage(),
        }

    def _full_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        prompt = self._prompt_text(index) if self.body.echo else ""
        choice: dict[str, Any] = {
            "index": index * self._n + one.index,
            "text": prompt + one.text,
            "logprobs": self._logprobs(CompletionLogprobs(self._as_ids), index, output, one, bool(self.body.echo)),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = one.token_ids
        return choice

    @property
    def _as_ids(self) -> bool:
        return bool(self.body.return_tokens_as_token_ids)

    def _prompt_text(self, index: int) -> str:
        prompt = self.work.prompts[index]
        return prompt.text if prompt.text is not None else self.context.decode(prompt.token_ids)

    def _logprobs(
        self, arrays: CompletionLogprobs, index: int, output: RequestOutput, one: CompletionOutput, with_prompt: bool
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        own = one.logprobs or []
        if not with_prompt:
            return arrays.arrays(own)
        pieces = self.context.pieces(self.work.prompts[index].token_ids)
        pieces += [next(iter(position.values())).decoded_token or "" for position in own]
        # A stream has them once, with its first output, but each of the n choices shows them.
        prompt = self._prompt_logprobs.setdefault(index, output.prompt_logprobs or [])
        return arrays.arrays([*prompt, *own], pieces)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events of the answer, without ``[DONE]``."""
        options = self.body.stream_options
        usage_on_each = bool(options and options.continuous_usage_stats)
        async for index, output in self.work.run(self.context):
            events = []
            for one in output.outputs:
                check_output(one)
                self.counter.add(index, output, len(one.token_ids))
                if chunk := self._chunk(index, output, one, usage_on_each):
                    events.append(chunk)
            if events:
                yield b"".join(events)
        if options and options.include_usage:
            yield event({**self._head(), "choices": [], "usage": self.counter.usage()})

    def _head(self) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.context.fingerprint}

    def _make_choice(self, number: int) -> _Choice:
        shape = {"index": number, "text": _MARK, "logprobs": None, "finish_reason": None, "stop_reason": None}
        template = ChunkTemplate.around({**self._head(), "choices": [shape]}, _MARK)
        return _Choice(template, CompletionLogprobs(self._as_ids))

    def _chunk(self, index: int, output: RequestOutput, one: CompletionOutput, with_usage: bool) -> bytes | None:
        number = index * self._n + one.index
        state = self._choices.get(number)
        if state is None:
            state = self._choices[number] = self._make_choice(number)
        first, state.started = not state.started, True
        plain = self.body.logprobs is None and not self.body.return_token_ids and not with_usage
        if plain and one.finish_reason is None and not (first and self.body.echo):
            return state.template.fill(one.text) if one.text else None
        choice = self._streamed_choice(number, index, output, one, state, first)
        chunk: dict[str, Any] = {**self._head(), "choices": [choice]}
        if with_usage:
            chunk["usage"] = self.counter.usage()
        return event(chunk)

    def _streamed_choice(
        self, number: int, index: int, output: RequestOutput, one: CompletionOutput, state: _Choice, first: bool
    ) -> dict[str, Any]:
        echo = first and bool(self.body.echo)
        choice: dict[str, Any] = {
            "index": number,
            "text": (self._prompt_text(index) if echo else "") + one.text,
            "logprobs": self._logprobs(state.logprobs, index, output, one, echo),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self.body.return_token_ids:
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = one.token_ids
        return choice
