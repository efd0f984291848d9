"""The items of a response as they grow, and the typed events that tell of it.

One builder serves streamed and whole answers: it is fed with what the parsers found and returns events; a whole answer
takes the items alone. At most one item is open; another kind of news closes it. Logprobs go with the message that
their tokens are of; those of marks, reasoning and calls are left out. Invariants: every item that was added is done
once, after its parts; sequence numbers have no gaps.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from headrace.entrypoints.openai.sse import typed_event
from headrace.frontend.parsers.events import CallDelta, ParsedDelta

_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def new_id(prefix: str) -> str:
    """A name that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


Logprobs = list[dict[str, Any]]


def _text_part(kind: str, text: str, logprobs: Logprobs) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass
class ItemBuilder:
    """See the module."""

    items: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _open: dict[str, Any] | None = None
    _pieces: list[str] = field(default_factory=list)
    _logprobs: Logprobs = field(default_factory=list)
    _waiting: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _call: int = -1

    @property
    def started(self) -> bool:
        """Whether an event has been made."""
        return self._number > 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event."""
        number, self._number = self._number, self._number + 1
        return typed_event({"type": kind, "sequence_number": number, **fields})

    def feed(self, delta: ParsedDelta, num_chars: int = 0, logprobs: Logprobs | None = None) -> list[bytes]:
        """Take news of the answer and return its events; ``logprobs`` are those of its token, if it comes by tokens.

        ``num_chars`` is the length of the text that was parsed.
        """
        events: list[bytes] = []
        self._waiting += [(num_chars, entry) for entry in logprobs or ()]
        if delta.reasoning:
            events += self._add_text("reasoning", delta.reasoning, [])
        if delta.content:
            events += self._add_text("message", delta.content, self._tokens_of(len(delta.content)))
        for call in delta.calls:
            events += self._add_call(call)
        if delta:
            self._waiting = []
        return events

    def _tokens_of(self, num_chars: int) -> Logprobs:
        """The newest tokens whose texts make up so many characters; what stood before them were marks."""
        place = len(self._waiting)
        # A token without text is the beginning of a character that the next one completes.
        while place and (num_chars > 0 or not self._waiting[place - 1][0]):
            place -= 1
            num_chars -= self._waiting[place][0]
        return [entry for _, entry in self._waiting[place:]]

    def close(self, status: str = "completed") -> list[bytes]:
        """End the open item, if there is one; ``status`` is ``incomplete`` where the answer was cut."""
        item, text, logprobs = self._open, "".join(self._pieces), self._logprobs
        if item is None:
            return []
        self._open = None
        self._pieces, self._logprobs = [], []
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self.event("response.function_call_arguments.done", arguments=text, name=item["name"], **place)]
        else:
            part = _text_part(item["type"], text, logprobs)
            item["content"] = [part]
            place["content_index"] = 0
            more: dict[str, Any] = {"logprobs": logprobs} if item["type"] == "message" else {}
            events = [
                self.event(f"{_TEXT_EVENTS[item['type']]}.done", text=text, **more, **place),
                self.event("response.content_part.done", part=part, **place),
            ]
        return [*events, self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)]

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        events = self.close()
        self.items.append(item)
        self._open = item
        return [*events, self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)]

    def _add_text(self, kind: str, text: str, logprobs: Logprobs) -> list[bytes]:
        events: list[bytes] = []
        if self._open is None or self._open["type"] != kind:
            events += self._begin(_new_text_item(kind))
            events.append(self._tell("response.content_part.added", content_index=0, part=_text_part(kind, "", [])))
        self._pieces.append(text)
        self._logprobs += logprobs
        more: dict[str, Any] = {"logprobs": logprobs} if kind == "message" else {}
        return [*events, self._tell(f"{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **more)]

    def _add_call(self, call: CallDelta) -> list[bytes]:
        events: list[bytes] = []
        if call.name is not None:
            self._call = call.index
            item = {"type": "function_call", "id": new_id("fc"), "call_id": new_id("call"), "name": call.name}
            events += self._begin({**item, "arguments": "", "status": "in_progress"})
        assert call.index == self._call, "calls come one after another"
        if call.arguments:
            self._pieces.append(call.arguments)
            events.append(self._tell("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _tell(self, kind: str, **fields: Any) -> bytes:
        """An event of the open item."""
        assert self._open is not None
        return self.event(kind, item_id=self._open["id"], output_index=len(self.items) - 1, **fields)


def _new_text_item(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": [], "status": "in_progress"}
    return {"type": "message", "id": new_id("msg"), "role": "assistant", "content": [], "status": "in_progress"}
