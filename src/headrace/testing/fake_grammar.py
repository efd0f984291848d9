"""A grammar that allows only even and odd tokens by turns; its compilation takes a number of looks.

It follows certain tokens alone, so a mask made before the last token was known would be for the wrong position, and the
test that reads the tokens would see it.
"""

from __future__ import annotations

import numpy as np

from headrace.messages.requests import EngineCoreRequest
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput


def forbidden_tokens(vocab_size: int, index: int) -> range:
    """What the grammar does not allow as output number ``index``."""
    return range(1 - index % 2, vocab_size, 2)


class FakeGrammar:
    """See the module.

    Args:
        vocab_size: width of the masks.
        looks: how often readiness is asked for before compilation has ended.
    """

    def __init__(self, vocab_size: int, looks: int = 2) -> None:
        self._vocab_size = vocab_size
        self._looks = looks
        self._waiting: dict[str, int] = {}
        self._num_accepted: dict[str, int] = {}

    def start(self, request: EngineCoreRequest) -> None:
        self._waiting[request.request_id] = self._looks
        self._num_accepted[request.request_id] = 0

    def is_ready(self, request_id: str) -> bool:
        self._waiting[request_id] -= 1
        return self._waiting[request_id] < 0

    def get_error(self, request_id: str) -> str | None:
        return None

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        for token_id in token_ids:
            if token_id % 2 != self._num_accepted[request_id] % 2:
                return f"token {token_id} is not allowed here"
            self._num_accepted[request_id] += 1
        return None

    def forget(self, request_id: str) -> None:
        self._num_accepted.pop(request_id, None)

    def make_bitmask(self, step: SchedulerOutput) -> GrammarOutput:
        # A request that ended since the step was scheduled needs no mask.
        request_ids = [request_id for request_id in step.grammar if request_id in self._num_accepted]
        num_words = -(-self._vocab_size // 32)
        patterns = (np.uint32(0x5555_5555), np.uint32(0xAAAA_AAAA))
        rows = [np.full(num_words, patterns[self._num_accepted[r] % 2], dtype=np.uint32) for r in request_ids]
        return GrammarOutput(
            request_ids=request_ids, bitmask=b"".join(row.tobytes() for row in rows), num_words=num_words
        )
