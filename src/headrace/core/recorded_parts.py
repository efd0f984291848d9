"""Grammars and connectors between the scheduler and the real ones: their answers are kept while it decides.

On a recorded run the answers are those of the real parts; on a replay they are those of the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.control.grammar.protocol import Grammar
from headrace.kv_connector.protocol import ExternalHit, LoadFailurePolicy, SchedulerConnector, SendLease
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput
from headrace.messages.scheduler_output import BlockIds


class Answers:
    """Answers given during the call in progress; nothing is kept between calls."""

    def __init__(self) -> None:
        self._kept: list[Any] | None = None

    @contextmanager
    def of_call(self) -> Iterator[list[Any]]:
        """Keep answers until the call ends; yields the list that they are kept in."""
        kept = self._kept = []
        try:
            yield kept
        finally:
            self._kept = None

    def keep(self, value: Any) -> None:
        """Keep an answer, if a call is in progress."""
        if self._kept is not None:
            self._kept.append(value)


class RecordedGrammar:
    """Passes everything on and keeps what came back."""

    def __init__(self, inner: Grammar, answers: Answers) -> None:
        self._inner = inner
        self._answers = answers

    def start(self, request: EngineCoreRequest) -> None:
        self._inner.start(request)

    def is_ready(self, request_id: str) -> bool:
        ready = self._inner.is_ready(request_id)
        self._answers.keep(ready)
        return ready

    def get_error(self, request_id: str) -> str | None:
        error = self._inner.get_error(request_id)
        self._answers.keep(None if error is None else "error")
        return error

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        error = self._inner.accept(request_id, token_ids)
        self._answers.keep(None if error is None else "error")
        return error

    def forget(self, request_id: str) -> None:
        self._inner.forget(request_id)


class RecordedConnector:
    """Passes everything on and keeps what came back."""

    def __init__(self, inner: SchedulerConnector, answers: Answers) -> None:
        self._inner = inner
        self._answers = answers
        self.load_failure_policy: LoadFailurePolicy = inner.load_failure_policy

    def get_external_hit(
        self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int
    ) -> ExternalHit | None:
        hit = self._inner.get_external_hit(request, num_tokens, num_local_tokens)
        self._answers.keep(None if hit is None else [hit.num_tokens, hit.is_async, hit.lease_s])
        return hit

    def on_allocated(
        self, request: EngineCoreRequest, block_ids: BlockIds, num_local_tokens: int, num_tokens: int
    ) -> None:
        self._inner.on_allocated(request, block_ids, num_local_tokens, num_tokens)

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        lease = self._inner.on_finished(request, block_ids, num_tokens)
        self._answers.keep(lease.lease_s)
        return lease

    def on_expired(self, request_id: str) -> None:
        self._inner.on_expired(request_id)

    def make_metadata(self) -> bytes | None:
        metadata = self._inner.make_metadata()
        self._answers.keep(metadata is not None)
        return metadata

    def on_output(self, output: ConnectorOutput) -> None:
        self._inner.on_output(output)


class ReplayedParts:
    """Grammar and connector at once, answering from a recording. ``answers`` is filled before each call."""

    def __init__(self, load_failure_policy: LoadFailurePolicy) -> None:
        self.load_failure_policy: LoadFailurePolicy = load_failure_policy
        self.answers: deque[Any] = deque()

    def start(self, request: EngineCoreRequest) -> None:
        return None

    def is_ready(self, request_id: str) -> bool:
        return bool(self.answers.popleft())

    def get_error(self, request_id: str) -> str | None:
        return self._next_error()

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        return self._next_error()

    def _next_error(self) -> str | None:
        error: str | None = self.answers.popleft()
        return error

    def forget(self, request_id: str) -> None:
        return None

    def get_external_hit(
        self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int
    ) -> ExternalHit | None:
        hit = self.answers.popleft()
        return None if hit is None else ExternalHit(*hit)

    def on_allocated(
        self, request: EngineCoreRequest, block_ids: BlockIds, num_local_tokens: int, num_tokens: int
    ) -> None:
        return None

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        return SendLease(self.answers.popleft())

    def on_expired(self, request_id: str) -> None:
        return None

    def make_metadata(self) -> bytes | None:
        return b"" if self.answers.popleft() else None

    def on_output(self, output: ConnectorOutput) -> None:
        return None
