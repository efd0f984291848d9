"""Answers of ``/v1/responses`` that clients may read again and go on from, when the operator gave them memory.

Kept in memory alone: the newest that fit, each for the key that made it and no other. What is asked for by a name that
is not there, or not the asker's, does not exist.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import InvalidRequestError
from headrace.entrypoints.openai.auth import get_owner
from headrace.entrypoints.openai.errors import ApiError

if TYPE_CHECKING:
    from headrace.entrypoints.openai.context import ServerContext

MAX_LISTED = 100
_PARAM = "response_id"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON of an answer, of the items that it was asked with, and of those that led up to them."""

    response: bytes
    asked: bytes
    before: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.asked) + len(self.before)

    def conversation(self) -> list[dict[str, Any]]:
        """All items up to the end of the answer."""
        before: list[dict[str, Any]] = msgspec.json.decode(self.before)
        output: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return [*before, *msgspec.json.decode(self.asked), *output]


class ResponseStore:
    """See the module. Large answers are stored from threads, so a lock holds the sum together.

    Args:
        limit: bytes of all answers together; 0 stores none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether anything is stored."""
        return self._limit > 0

    def put(self, owner: str | None, name: str, stored: StoredResponse) -> None:
        """Keep an answer, in the place of the oldest ones; one that is larger than everything together is not kept."""
        with self._lock:
            self._drop(owner, name)
            if stored.size > self._limit:
                return
            self._kept[owner, name] = stored
            self._size += stored.size
            while self._size > self._limit:
                _, oldest = self._kept.popitem(last=False)
                self._size -= oldest.size

    def get(self, owner: str | None, name: str) -> StoredResponse | None:
        """An answer by its id."""
        return self._kept.get((owner, name))

    def remove(self, owner: str | None, name: str) -> bool:
        """Forget an answer; returns whether it was there."""
        with self._lock:
            return self._drop(owner, name)

    def _drop(self, owner: str | None, name: str) -> bool:
        stored = self._kept.pop((owner, name), None)
        self._size -= stored.size if stored is not None else 0
        return stored is not None


def _check_on(context: ServerContext) -> None:
    if not context.responses.is_on:
        message = "answers are not stored; they would be with --response-store"
        raise ApiError(404, message, param=_PARAM, code="response_not_found")


def _missing() -> ApiError:
    return ApiError(404, "there is no such response; the newest are kept", param=_PARAM, code="response_not_found")


def _find(context: ServerContext, request: Request) -> StoredResponse:
    _check_on(context)
    stored = context.responses.get(get_owner(), request.path_params[_PARAM])
    if stored is None:
        raise _missing()
    return stored


async def retrieve(context: ServerContext, request: Request) -> Response:
    """``GET /v1/responses/{id}``: a stored answer as it was given."""
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequestError("stream: stored answers are not streamed", param="stream")
    return Response(_find(context, request).response, media_type="application/json")


async def delete(context: ServerContext, request: Request) -> Response:
    """``DELETE /v1/responses/{id}``."""
    _check_on(context)
    name = request.path_params[_PARAM]
    if not context.responses.remove(get_owner(), name):
        raise _missing()
    answer = {"id": name, "object": "response", "deleted": True}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def list_input(context: ServerContext, request: Request) -> Response:
    """``GET /v1/responses/{id}/input_items``: what it was asked with, newest first, a page at a time."""
    items: list[dict[str, Any]] = msgspec.json.decode(_find(context, request).asked)
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_LISTED):
        raise InvalidRequestError(f"limit must be an integer from 1 to {MAX_LISTED}", param="limit")
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise InvalidRequestError("after must be the id of an item", param="after")
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    answer = {"object": "list", "data": shown, **ends, "has_more": len(items) > len(shown)}
    return Response(msgspec.json.encode(answer), media_type="application/json")
