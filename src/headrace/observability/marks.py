"""The frontend's own marks on a request's life: arrival, tokenising, sending, detokenising, delivery.

A request of a server gets its `Marks` at the edge, where it arrives; everything below finds them through a context
variable, so that no signature carries them. The book keeps them by the id that the client knows and by the ids that the
core knows, for all that live and a bounded number of those that ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar

MAX_KEPT = 1024
MAX_PROMPT_CHARS = 16_384
_MAX_BUSY = 4096
_SHORTEST_BUSY_S = 2e-4


class Marks:
    """Times of one request, in `Clock.monotonic` seconds; 0 where it has not come so far.

    Attributes:
        http: whether somebody waits for an answer to be delivered.
        tokenising: stretches of it.
        ends: by internal id, when the last output was seen and when it had been processed.
        owner: which of several API keys it came with.
        prompts: beginnings of its prompts, kept only if the operator said so.
    """

    __slots__ = ("arrival", "delivered", "ends", "external_id", "http", "ids", "owner", "prompts", "sent", "tokenising")

    def __init__(self, arrival: float, *, http: bool = False, owner: str | None = None) -> None:
        self.external_id = ""
        self.arrival = arrival
        self.http = http
        self.owner = owner
        self.prompts: list[str] = []
        self.tokenising: list[tuple[float, float]] = []
        self.sent = 0.0
        self.ids: list[str] = []
        self.ends: dict[str, tuple[float, float]] = {}
        self.delivered = 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing of it lives in the engine."""
        return len(self.ends) == len(self.ids)


CURRENT: ContextVar[Marks | None] = ContextVar("marks", default=None)


class MarkBook:
    """See the module.

    Args:
        max_kept: ended requests that can still be asked about.
    """

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._by_external: dict[str, Marks] = {}
        self._by_internal: dict[str, Marks] = {}
        self._order: deque[Marks] = deque()
        self.busy: deque[tuple[float, float]] = deque(maxlen=_MAX_BUSY)

    def __len__(self) -> int:
        return len(self._order)

    def tokenised(self, start: float, end: float) -> None:
        """A prompt of the current request was tokenised."""
        marks = CURRENT.get()
        if marks is not None:
            marks.tokenising.append((start, end))

    def open(self, arrival: float) -> Marks:
        """The marks of the request that is being handled; new ones for a caller without an edge."""
        return CURRENT.get() or Marks(arrival)

    def keep_prompts(self, marks: Marks, prompts: Iterable[str]) -> None:
        """Let explanations of a request show what it asked."""
        marks.prompts += (prompt[:MAX_PROMPT_CHARS] for prompt in prompts)

    def bind(self, marks: Marks, external_id: str, ids: Iterable[str], now: float) -> None:
        """The request goes to the core as ``ids``."""
        if not marks.ids:
            self._order.append(marks)
            self._forget_old()
        marks.external_id = external_id
        marks.sent = now
        marks.ids += ids
        self._by_external[external_id] = marks
        self._by_internal.update(dict.fromkeys(marks.ids, marks))

    def ended(self, ids: Iterable[str], seen: float, processed: float) -> None:
        """The last outputs of these requests came at ``seen``; what they held was ready at ``processed``."""
        for request_id in ids:
            marks = self._by_internal.get(request_id)
            if marks is not None:
                marks.ends.setdefault(request_id, (seen, processed))

    def worked(self, start: float, end: float) -> None:
        """The frontend was busy with outputs, of whatever request."""
        if end - start >= _SHORTEST_BUSY_S:
            self.busy.append((start, end))

    def find(self, name: str) -> Marks | None:
        """By the client's id, with or without the prefix of the route that made it, or by an internal id."""
        found = self._by_external.get(name) or self._by_internal.get(name)
        if found is not None:
            return found
        ending = f"-{name}"
        return next((marks for marks in reversed(self._order) if marks.external_id.endswith(ending)), None)

    def name_of(self, internal_id: str) -> str:
        """What the client calls a request of the core."""
        marks = self._by_internal.get(internal_id)
        return marks.external_id if marks is not None else internal_id

    def latest(self, count: int) -> list[Marks]:
        """The youngest requests, latest first."""
        return [marks for marks, _ in zip(reversed(self._order), range(count), strict=False)]

    def _forget_old(self) -> None:
        """Drop ended requests from the old end; one that still lives there stands in the way only for a while."""
        while len(self._order) > self._max_kept and self._order[0].ended:
            marks = self._order.popleft()
            for request_id in marks.ids:
                self._by_internal.pop(request_id, None)
            if self._by_external.get(marks.external_id) is marks:
                del self._by_external[marks.external_id]
