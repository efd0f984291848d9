"""The frontend's handle on an engine core, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from headrace.messages.outputs import CoreReady, EngineCoreOutputs
from headrace.messages.requests import AnyControl, EngineCoreRequest


class EngineCoreClient(ABC):
    """Sends requests and control verbs, hands out what comes back. One consumer calls `get_output`.

    After death every call raises `EngineDeadError` with the root cause.
    """

    @abstractmethod
    async def start(self) -> CoreReady:
        """Wait until the core can serve. Raises the core's own start-up error."""

    @abstractmethod
    async def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored. Never raises for a dead core."""

    @abstractmethod
    async def control(self, request: AnyControl, timeout_s: float = 60.0) -> Any:
        """Send a verb (its ``call_id`` is set here) and wait for its reply.

        Raises:
            RequestFailedError: the verb failed; the engine goes on.
            TimeoutError: no reply in time.
        """

    @abstractmethod
    async def get_output(self) -> EngineCoreOutputs:
        """Wait for the next message; raises `EngineDeadError` when the core is gone."""

    @property
    @abstractmethod
    def dead_reason(self) -> str | None:
        """Why the core is gone, or ``None`` while it lives."""

    @abstractmethod
    def progress(self) -> int:
        """The core's progress word now."""

    @abstractmethod
    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Stop the core (after finishing running requests, for at most ``drain_s``) and release everything."""
