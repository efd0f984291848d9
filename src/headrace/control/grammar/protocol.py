"""What the scheduler asks of grammars: readiness, and to follow the tokens that became certain."""

from __future__ import annotations

from typing import Protocol

from headrace.messages.requests import EngineCoreRequest


class Grammar(Protocol):
    """Grammars by request id. Compilation happens elsewhere; every method returns at once."""

    def start(self, request: EngineCoreRequest) -> None:
        """Begin to compile the grammar of a request with ``structured_outputs``."""
        ...

    def is_ready(self, request_id: str) -> bool:
        """Whether compilation has ended, well or not."""
        ...

    def get_error(self, request_id: str) -> str | None:
        """Why the grammar cannot be used, or ``None``."""
        ...

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        """Advance over tokens that are certain; the error when the grammar forbids them."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended; unknown ids are ignored."""
        ...
