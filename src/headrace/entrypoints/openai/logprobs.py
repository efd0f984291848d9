"""The two layouts of log-probabilities: parallel arrays of completions, items of chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headrace.messages.request_output import Logprob, PositionLogprobs

LOWEST = -9999.0
"""JSON has no infinity."""


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _name(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else (entry.decoded_token or "")


class CompletionLogprobs:
    """Builds the arrays of one choice; ``text_offset`` goes on from chunk to chunk.

    Args:
        as_ids: write ``token_id:N`` instead of text.
    """

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._offset = 0

    def arrays(self, positions: Iterable[PositionLogprobs | None], pieces: list[str] | None = None) -> dict[str, Any]:
        """The arrays for the next positions.

        Args:
            positions: chosen token first; ``None`` for a token that has nothing before it.
            pieces: texts of the tokens where they differ from ``decoded_token``; required where a position is ``None``.
        """
        tokens: list[str] = []
        chosen_logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for place, position in enumerate(positions):
            text = pieces[place] if pieces else ""
            if position:
                token_id, chosen = next(iter(position.items()))
                text = text if pieces else (chosen.decoded_token or "")
                tokens.append(f"token_id:{token_id}" if self._as_ids else text)
                chosen_logprobs.append(_finite(chosen.logprob))
                tops.append({_name(i, e, self._as_ids): _finite(e.logprob) for i, e in position.items()})
            else:
                tokens.append(text)
                chosen_logprobs.append(None)
                tops.append(None)
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": tokens, "token_logprobs": chosen_logprobs, "top_logprobs": tops, "text_offset": offsets}

    def skip(self, num_chars: int) -> None:
        """Text that stands before the next token and has no entries."""
        self._offset += num_chars


def chat_logprobs(
    positions: Iterable[PositionLogprobs], top: int, as_ids: bool, token_bytes: Callable[[int], bytes]
) -> list[dict[str, Any]]:
    """The items of a chat choice, each with exactly ``top`` candidates, best first."""
    content: list[dict[str, Any]] = []
    for position in positions:
        token_id, chosen = next(iter(position.items()))
        best = sorted(position.items(), key=lambda pair: (-pair[1].logprob, pair[1].rank or 0, pair[0]))[:top]
        item = _item(token_id, chosen, as_ids, token_bytes)
        item["top_logprobs"] = [_item(i, entry, as_ids, token_bytes) for i, entry in best]
        content.append(item)
    return content


def _item(token_id: int, entry: Logprob, as_ids: bool, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    data = list(token_bytes(token_id))
    return {"token": _name(token_id, entry, as_ids), "logprob": _finite(entry.logprob), "bytes": data}


def prompt_logprobs_json(positions: list[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs`` of an answer: token id to its entry, null for the first token."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for token_id, e in position.items()
        }
        for position in positions
    ]
