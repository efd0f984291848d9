"""One row per request for as long as it stays scheduled: its tokens and its sampling parameters.

Owns which row belongs to whom and what each row holds. It does not know what is scheduled: how many tokens are
computed comes with every step. A preemption ends the row; a request that resumes gets a new one.

Invariants:
- A row is overwritten as a whole when it gets a request; adding a request that has a row overwrites that row.
- The only thing that a step changes is the token at the absolute position that it sampled. Everything derived from
  tokens (penalty counts, bad words, min_tokens) follows the position. So a step can run again, and an earlier one
  too, with the same result, and the forward of the next step finds the token before the host has seen it.
- Whether a step samples a row depends on positions alone: it does when it computes the last token that was known when
  the row was made, or a later one.
"""

from __future__ import annotations

import numpy as np

from headrace.device.sampling.rows import SamplingRows
from headrace.messages.scheduler_output import NewRequest


class RequestStates:
    """The rows.

    Args:
        max_rows: most requests that run at once.
        max_model_len: most tokens of a request; a row holds one more, for the token sampled at the limit.
        vocab_size: width of the logits.
    """

    def __init__(self, max_rows: int, max_model_len: int, vocab_size: int) -> None:
        self.token_ids = np.zeros((max_rows, max_model_len + 1), dtype=np.int32)
        self.num_prompt = np.zeros(max_rows, dtype=np.int32)
        self.num_given = [0] * max_rows
        """Tokens known when the row was made: the prompt and, for a resumed request, its outputs."""
        self.sampling = SamplingRows(max_rows, vocab_size)
        self.lora_names: list[str | None] = [None] * max_rows
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def row(self, request_id: str) -> int:
        """The request's row (`KeyError` when it has none)."""
        return self._row_of[request_id]

    def add(self, request: NewRequest) -> int:
        """Give a request a row, or overwrite the one that it has."""
        row = self._row_of.get(request.request_id)
        if row is None:
            if not self._free:
                raise RuntimeError(f"all {len(self.token_ids)} rows are taken")
            row = self._free.pop()
            self._row_of[request.request_id] = row
        count = len(request.token_ids)
        self.token_ids[row, :count] = request.token_ids
        self.token_ids[row, count:] = 0
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_given[row] = count
        self.lora_names[row] = request.lora_name
        self.sampling.set_row(row, request)
        return row

    def remove(self, request_id: str) -> None:
        """End a request's row; a request without one is ignored."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self.sampling.clear_row(row)
            self._free.append(row)

    def write_sampled(self, row: int, position: int, token_id: int) -> None:
        """Put a sampled token at its absolute position."""
        self.token_ids[row, position] = token_id

    def check_invariants(self) -> None:
        """Each row is free or has one owner."""
        taken = list(self._row_of.values())
        assert sorted(taken + self._free) == list(range(len(self.token_ids))), "a row is lost or owned twice"
        assert all(self.sampling.extras[row] is None for row in self._free), "a free row keeps state"
