"""``/v1/chat/completions``: messages in, a message out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.chat_parts import AnswerParts, delta_of, message_of
from headrace.entrypoints.openai.constraints import read_chat_constraint
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.generation import UsageCounter, Work, check_output
from headrace.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from headrace.entrypoints.openai.protocol import ChatMessage, ChatRequest, TokenizeRequest, Usage
from headrace.entrypoints.openai.refusals import check_refusals
from headrace.entrypoints.openai.sampling import check_stream_fields, make_sampling
from headrace.entrypoints.openai.sse import ChunkTemplate, event
from headrace.frontend.input_processor import PromptTokens
from headrace.frontend.tools import ToolPlan, plan_tools
from headrace.messages.request_output import CompletionOutput, RequestOutput

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DEFAULT_EFFORT = "medium"
_MARK = "\x00text\x00"


def check_chat(body: ChatRequest) -> None:
    """Refuse contradictions that need no model."""
    check_refusals(body)
    check_stream_fields(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        message = "max_tokens and max_completion_tokens must not differ; max_tokens is the older name"
        raise InvalidRequestError(message, param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    """A message as the template gets it, without what is null."""
    fields = msgspec.structs.asdict(message)
    return {name: value for name, value in fields.items() if value is not None}


async def read_plan(context: ServerContext, body: ChatRequest | TokenizeRequest) -> ToolPlan:
    """What a body wants with tools, checked beside the event loop when there are any."""
    most = context.llm.input.limits.most
    parallel = body.parallel_tool_calls if isinstance(body, ChatRequest) else None
    if body.tools is None:
        return plan_tools(None, body.tool_choice, parallel, most)
    plan = await context.llm.run_beside(plan_tools, body.tools, body.tool_choice, parallel, most)
    if plan.mode == "auto" and not context.llm.config.model.enable_auto_tool_choice:
        message = "tool_choice auto needs the server's --enable-auto-tool-choice; use none, required or a function"
        raise InvalidRequestError(message, param="tool_choice")
    return plan


def read_effort(context: ServerContext, effort: Any) -> dict[str, Any]:
    """What ``reasoning_effort`` says to the chat template.

    Raises:
        InvalidRequestError: the model has no such effort.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise _refuse_effort(f"must be one of {', '.join(EFFORTS)}")
    template = context.llm.chat_template
    variables = template.variables if template is not None else frozenset()
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    if effort == "none":
        if "enable_thinking" in variables:
            return {"enable_thinking": False}
        if context.reasoning_format is not None:
            raise _refuse_effort("this model cannot leave its reasoning out")
        return {}
    if effort == DEFAULT_EFFORT and context.reasoning_format is not None:
        return {}
    raise _refuse_effort("not supported by this model; leave it out")


def _refuse_effort(reason: str) -> InvalidRequestError:
    message = f"reasoning_effort: {reason}"
    return InvalidRequestError(message, param="reasoning_effort", code="unsupported_parameter")


async def render(
    context: ServerContext, body: ChatRequest | TokenizeRequest, plan: ToolPlan, effort: Any = None
) -> PromptTokens:
    """The prompt of a chat, alike for answering and for counting."""
    assert body.messages is not None
    messages: list[Any] = [_as_dict(message) for message in body.messages]
    generation = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return await context.llm.tokenize_chat(
        messages,
        tools=plan.for_template(),
        add_special_tokens=body.add_special_tokens is not False,
        add_generation_prompt=generation,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs={**read_effort(context, effort), **(body.chat_template_kwargs or {})},
    )


@dataclass
class ChatCall:
    """One request of this route, from its checked body to its answer."""

    context: ServerContext
    body: ChatRequest
    answer_id: str
    model: str
    work: Work
    parts: AnswerParts
    created: int = field(default_factory=lambda: int(time.time()))
    counter: UsageCounter = field(default_factory=UsageCounter)
    _templates: dict[int, ChunkTemplate] = field(default_factory=dict)
    _final: RequestOutput | None = None

    @classmethod
    async def prepare(cls, context: ServerContext, body: ChatRequest, request_id: str) -> ChatCall:
        """Check everything, render and tokenise; nothing is queued yet."""
        check_chat(body)
        model = context.check_model(body.model)
        answer_id = f"chatcmpl-{request_id}"
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        default = context.sampling_defaults.get("max_tokens")
        plan = await read_plan(context, body)
        constraint = read_chat_constraint(body, plan, context.tool_format.tag)
        sampling = make_sampling(
            body,
            context.sampling_defaults,
            context.llm.input.limits.most,
            max_tokens=default if asked is None else asked,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=constraint.params if constraint is not None else None,
        )
        prompt = await render(context, body, plan, body.reasoning_effort)
        parts = AnswerParts(context, plan, prompt.text or "", body.include_reasoning is not False)
        sampling = parts.adapt(sampling, explicit=body.skip_special_tokens is not None)
        if constraint is not None:
            sampling = await context.llm.check_constraint(sampling, constraint.param)
        counter = UsageCounter(bool(body.return_timing))
        return cls(context, body, answer_id, model, Work(answer_id, [prompt], sampling, body), parts, counter=counter)

    async def collect(self) -> None:
        """Wait for the output."""
        async for _, output in self.work.run(self.context):
            self._final = output

    def build(self) -> dict[str, Any]:
        """The whole answer from what was collected."""
        final = self._final
        assert final is not None
        choices = []
        for one in final.outputs:
            check_output(one)
            self.counter.add(0, final, len(one.token_ids))
            choices.append(self._full_choice(one))
        answer = {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_json(final.prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = final.prompt_token_ids
        return answer

    def _full_choice(self, one: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "message": message_of(self.parts.parse(one)),
            "logprobs": self._logprobs(one),
            "finish_reason": self.parts.finish_reason(one),
            "stop_reason": one.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    def _usage(self) -> Usage:
        return self.counter.usage(self.parts.num_reasoning_tokens)

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.context.fingerprint}

    def logprob_items(self, one: CompletionOutput) -> list[dict[str, Any]]:
        """An entry per token."""
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(one.logprobs or [], self.body.top_logprobs or 0, as_ids, self.context.token_bytes)

    def _logprobs(self, one: CompletionOutput) -> dict[str, Any] | None:
        return {"content": self.logprob_items(one), "refusal": None} if self.body.logprobs else None

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events of the answer, without ``[DONE]``."""
        options = self.body.stream_options
        usage_on_each = bool(options and options.continuous_usage_stats)
        async for _, output in self.work.run(self.context):
            events = []
            for one in output.outputs:
                check_output(one)
                self.counter.add(0, output, len(one.token_ids))
                if one.index not in self._templates:
                    events.append(self._first_chunk(one.index, output, usage_on_each))
                if chunk := self._chunk(one, usage_on_each):
                    events.append(chunk)
            if events:
                yield b"".join(events)
        if options and options.include_usage:
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()})

    def _first_chunk(self, index: int, output: RequestOutput, with_usage: bool) -> bytes:
        shape = {"index": index, "delta": {"content": _MARK}, "logprobs": None, "finish_reason": None}
        head = self._head("chat.completion.chunk")
        self._templates[index] = ChunkTemplate.around({**head, "choices": [shape]}, _MARK)
        choice = {**shape, "delta": {"role": "assistant", "content": ""}}
        chunk: dict[str, Any] = {**head, "choices": [choice]}
        if self.body.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids
        if with_usage:
            chunk["usage"] = self._usage()
        return event(chunk)

    def _chunk(self, one: CompletionOutput, with_usage: bool) -> bytes | None:
        plain = not self.body.logprobs and not self.body.return_token_ids and not with_usage
        if plain and one.finish_reason is None and not self.parts.needed:
            return self._templates[one.index].fill(one.text) if one.text else None
        delta = delta_of(self.parts.parse(one))
        if plain and one.finish_reason is None and not delta:
            return None
        choice: dict[str, Any] = {
            "index": one.index,
            "delta": delta,
            "logprobs": self._logprobs(one),
            "finish_reason": self.parts.finish_reason(one),
        }
        if one.finish_reason is not None:
            choice["stop_reason"] = one.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = one.token_ids
        chunk: dict[str, Any] = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if with_usage:
            chunk["usage"] = self._usage()
        return event(chunk)
