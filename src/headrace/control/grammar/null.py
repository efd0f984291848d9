"""No grammars: the edge refuses requests that ask for one."""

from __future__ import annotations

from headrace.messages.requests import EngineCoreRequest


class NullGrammar:
    """Every request with ``structured_outputs`` fails by name, for nothing may be left unenforced in silence."""

    def start(self, request: EngineCoreRequest) -> None:
        return None

    def is_ready(self, request_id: str) -> bool:
        return True

    def get_error(self, request_id: str) -> str | None:
        return "structured_outputs is not available in this engine"

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        return None

    def forget(self, request_id: str) -> None:
        return None
