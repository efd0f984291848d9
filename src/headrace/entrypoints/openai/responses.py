"""``/v1/responses``: items in, items out; answers are stored only where the operator gave them memory.

The request is answered as the chat that asks for the same (`responses_input`); what differs is how the answer is
written down (`responses_items`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.auth import get_owner
from headrace.entrypoints.openai.body import read
from headrace.entrypoints.openai.chat import ChatCall
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.errors import describe
from headrace.entrypoints.openai.generate import deliver, name_request
from headrace.entrypoints.openai.generation import Work, check_output
from headrace.entrypoints.openai.protocol import ResponsesRequest, Usage
from headrace.entrypoints.openai.refusals import check_refusals
from headrace.entrypoints.openai.responses_input import RULES, STORED_RULES, as_items, describe_body, make_chat, rename
from headrace.entrypoints.openai.responses_items import ItemBuilder
from headrace.entrypoints.openai.responses_store import StoredResponse
from headrace.entrypoints.openai.sampling import check_stream_fields
from headrace.entrypoints.openai.sse import EventStream
from headrace.entrypoints.openai.token_cutter import TokenCutter
from headrace.messages.request_output import CompletionOutput, RequestOutput


async def respond(context: ServerContext, request: Request) -> Response:
    """``POST /v1/responses``."""
    body = await read(context, request, ResponsesRequest)
    call = await ResponsesCall.prepare(context, body, name_request(request, body.request_id))

    def make_stream(first: bytes, events: AsyncGenerator[bytes, None]) -> TypedStream:
        return TypedStream(first, events, call.builder)

    return await deliver(context, call, request, bool(body.stream), make_stream)


class TypedStream(EventStream):
    """Its last event says that it is the last; faults have a type like all others."""

    end = b""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], builder: ItemBuilder) -> None:
        super().__init__(first, events)
        self._builder = builder

    def _last_words(self, error: Exception) -> bytes:
        info = describe(error, self._request_id)
        return self._builder.event("error", code=info.code, message=info.message, param=info.param)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a request adds to a stored conversation, and whether that is kept."""

    owner: str | None
    keep: bool
    before: list[dict[str, Any]]
    asked: list[dict[str, Any]]

    @classmethod
    def of(cls, context: ServerContext, body: ResponsesRequest) -> _Turn | None:
        """The turn of a request; ``None`` when it has no part in stored answers."""
        previous = body.previous_response_id
        if not context.responses.is_on or (body.store is False and previous is None):
            return None
        owner, before = get_owner(), []
        if previous is not None:
            found = context.responses.get(owner, previous)
            if found is None:
                message = "previous_response_id names no response that is stored; the newest are"
                raise InvalidRequestError(message, param="previous_response_id", code="previous_response_not_found")
            before = found.conversation()
        return cls(owner, body.store is not False, before, as_items(body.input))


@dataclass
class ResponsesCall:
    """One request of this route, from its checked body to its answer."""

    context: ServerContext
    body: ResponsesRequest
    answer_id: str
    chat: ChatCall
    cutter: TokenCutter | None
    turn: _Turn | None
    created: int = field(default_factory=lambda: int(time.time()))
    builder: ItemBuilder = field(default_factory=ItemBuilder)
    _final: RequestOutput | None = None

    @classmethod
    async def prepare(cls, context: ServerContext, body: ResponsesRequest, request_id: str) -> ResponsesCall:
        """Check everything, render and tokenise; nothing is queued yet."""
        check_refusals(body, rules=STORED_RULES if context.responses.is_on else RULES)
        check_stream_fields(body)
        turn = _Turn.of(context, body)
        whole = body if turn is None else msgspec.structs.replace(body, input=[*turn.before, *turn.asked])
        try:
            max_items = context.llm.input.limits.most.max_messages
            chat = await ChatCall.prepare(context, make_chat(whole, max_items), request_id)
        except InvalidRequestError as error:
            raise rename(error) from None
        answer_id = f"resp_{request_id}"
        chat.work = replace(chat.work, answer_id=answer_id)
        cutter = None if chat.work.sampling.logprobs is None else TokenCutter(chat.parts.hidden_token_ids)
        return cls(context, body, answer_id, chat, cutter, turn)

    @property
    def work(self) -> Work:
        """What is sent to the engine."""
        return self.chat.work

    async def collect(self) -> None:
        """Wait for the output."""
        async for _, output in self.work.run(self.context):
            self._final = output

    def build(self) -> dict[str, Any]:
        """The whole answer from what was collected."""
        assert self._final is not None
        (last,) = self._final.outputs
        check_output(last)
        self.chat.counter.add(0, self._final, len(last.token_ids))
        self._feed(last)
        status = _status(last)
        self.builder.close(status)
        response = self._response(status, last)
        self._store(response)
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Its typed events."""
        builder = self.builder
        async for _, output in self.work.run(self.context):
            events: list[bytes] = []
            if not builder.started:
                events += [
                    builder.event(f"response.{kind}", response=self._response("in_progress", None))
                    for kind in ("created", "in_progress")
                ]
            for one in output.outputs:
                check_output(one)
                self.chat.counter.add(0, output, len(one.token_ids))
                events += self._feed(one)
                if one.finish_reason is not None:
                    status = _status(one)
                    events += builder.close(status)
                    response = self._response(status, one)
                    self._store(response)
                    events.append(builder.event(f"response.{status}", response=response))
            if events:
                yield b"".join(events)

    def _feed(self, one: CompletionOutput) -> list[bytes]:
        """Parse news of the answer, token by token where each goes with its logprobs."""
        if self.cutter is None:
            return self.builder.feed(self.chat.parts.parse(one))
        events: list[bytes] = []
        for piece in self.cutter.cut(one):
            events += self.builder.feed(self.chat.parts.parse(piece), len(piece.text), self.chat.logprob_items(piece))
        return events

    @property
    def _is_stored(self) -> bool:
        return self.turn is not None and self.turn.keep

    def _store(self, response: dict[str, Any]) -> None:
        if self._is_stored:
            assert self.turn is not None
            encode = msgspec.json.encode
            stored = StoredResponse(encode(response), encode(self.turn.asked), encode(self.turn.before))
            self.context.responses.put(self.turn.owner, self.answer_id, stored)

    def _response(self, status: str, last: CompletionOutput | None) -> dict[str, Any]:
        usage = self.chat.counter.usage(self.chat.parts.num_reasoning_tokens or 0)
        reason = {"length": "max_output_tokens"}.get(last.finish_reason or "") if last is not None else None
        shown = describe_body(self.body)
        sampling = self.chat.work.sampling
        shown |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "store": self._is_stored}
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.chat.model,
            "output": self.builder.items,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "usage": _usage(usage) if last is not None else None,
            **shown,
        }


def _status(last: CompletionOutput) -> str:
    """``incomplete`` for an answer that was cut by a limit or by an abort."""
    return "completed" if last.finish_reason == "stop" else "incomplete"


def _usage(usage: Usage) -> dict[str, Any]:
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details is not None else 0},
        "total_tokens": usage.total_tokens,
    }
