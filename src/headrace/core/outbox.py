"""What the clients are to hear at the end of a step, gathered by client."""

from __future__ import annotations

from headrace.messages.outputs import (
    ControlReply,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
)


class Outbox:
    """Collects outputs and replies between two steps; `take` empties it."""

    def __init__(self) -> None:
        self._by_client: dict[int, EngineCoreOutputs] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def add(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Append what a commit brought, in the order of commits."""
        for client_index, new in outputs.items():
            known = self._by_client.setdefault(client_index, new)
            if known is not new:
                known.outputs.extend(new.outputs)
                known.replies.extend(new.replies)
                known.stats = new.stats or known.stats

    def reply(self, client_index: int, reply: ControlReply) -> None:
        """Answer a control call."""
        self.add({client_index: EngineCoreOutputs(replies=[reply])})

    def refuse(self, client_index: int, request_id: str, error: str) -> None:
        """End a request that never came to run."""
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=error,
        )
        self.add({client_index: EngineCoreOutputs(outputs=[output])})

    def set_stats(self, client_index: int, stats: SchedulerStats) -> None:
        """Tell the newest statistics."""
        self.add({client_index: EngineCoreOutputs(stats=stats)})

    def take(self) -> dict[int, EngineCoreOutputs]:
        """All that was gathered, by client."""
        taken, self._by_client = self._by_client, {}
        return taken
