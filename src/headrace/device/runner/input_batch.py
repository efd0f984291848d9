"""The inputs of one step: which requests stand where, and the token ids and positions that the forward reads.

Batch order: decode-like rows first, then short extends, then long prefills (a stable sort by scheduled tokens),
whatever order they were scheduled in. All tensors are views from the start of persistent buffers, so their addresses
never change and a captured graph can read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.device.runner.request_states import RequestStates
from headrace.device.sampling.rows import NO_LOGPROBS
from headrace.messages.scheduler_output import SchedulerOutput


class Buffer:
    """Memory that NumPy fills and PyTorch reads."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.torch = torch.zeros(shape, dtype=dtype)
        self.np: np.ndarray[Any, np.dtype[Any]] = self.torch.numpy()


class InputBuffers:
    """Persistent step inputs.

    Args:
        max_tokens: most tokens of a step.
        max_reqs: most requests of a step.
        max_blocks: blocks of a row, per KV cache group.
    """

    def __init__(self, max_tokens: int, max_reqs: int, max_blocks: list[int]) -> None:
        self.max_tokens = max_tokens
        self.ids = Buffer((max_tokens,), torch.int32)
        self.positions = Buffer((max_tokens,), torch.int32)
        self.query_start_loc = Buffer((max_reqs + 1,), torch.int32)
        self.seq_lens = Buffer((max_reqs,), torch.int32)
        self.logits_rows = Buffer((max_reqs,), torch.int32)
        self.block_tables = [Buffer((max_reqs, width), torch.int32) for width in max_blocks]
        self.slot_mappings = [Buffer((max_tokens,), torch.int64) for _ in max_blocks]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Token rows of a step whose logits give a request's prompt log-probabilities.

    Row ``first_row + i`` predicts prompt position ``start + i``.
    """

    place: int
    first_row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step in batch order; arrays are the step's own unless they are views of `InputBuffers`.

    Attributes:
        request_ids: by place.
        rows: ``req_idx`` by place (the ``idx_mapping``).
        seq_lens: tokens computed after this step, by place.
        token_rows, token_positions: ``req_idx`` and absolute position of each token.
        sampled_places: places whose last known token is computed in this step, ascending.
        prompt_rows: prompt log-probabilities to compute.
        uniform_query_len: the query length of every place, or 0 when they differ.
    """

    request_ids: list[str]
    rows: np.ndarray
    seq_lens: np.ndarray
    token_rows: np.ndarray
    token_positions: np.ndarray
    sampled_places: np.ndarray
    prompt_rows: list[PromptRows]
    num_tokens: int
    max_query_len: int
    uniform_query_len: int

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return len(self.request_ids)


def prepare_inputs(step: SchedulerOutput, states: RequestStates, buffers: InputBuffers) -> InputBatch:
    """Fill the buffers for a step whose rows are up to date."""
    computed_of = dict(zip(step.cached.request_ids, step.cached.num_computed_tokens, strict=True))
    computed_of.update((request.request_id, request.num_computed_tokens) for request in step.new)
    scheduled = np.fromiter(step.num_scheduled_tokens.values(), dtype=np.int64, count=len(step.num_scheduled_tokens))
    order = np.argsort(scheduled, kind="stable")
    names = list(step.num_scheduled_tokens)
    request_ids = [names[i] for i in order.tolist()]
    query_lens = scheduled[order]
    rows = np.array([states.row(r) for r in request_ids], dtype=np.int64)
    computed = np.array([computed_of[r] for r in request_ids], dtype=np.int64)
    seq_lens = computed + query_lens
    num_tokens = int(query_lens.sum())
    if num_tokens > buffers.max_tokens:
        raise RuntimeError(f"a step of {num_tokens} tokens exceeds the {buffers.max_tokens} that inputs hold")
    num_reqs = len(request_ids)

    starts = np.zeros(num_reqs + 1, dtype=np.int64)
    np.cumsum(query_lens, out=starts[1:])
    token_rows = np.repeat(rows, query_lens)
    token_positions = np.arange(num_tokens) + np.repeat(computed - starts[:-1], query_lens)
    buffers.ids.np[:num_tokens] = states.token_ids[token_rows, token_positions]
    buffers.ids.np[num_tokens:] = 0
    buffers.positions.np[:num_tokens] = token_positions
    buffers.positions.np[num_tokens:] = 0
    buffers.query_start_loc.np[: num_reqs + 1] = starts
    buffers.query_start_loc.np[num_reqs + 1 :] = num_tokens
    buffers.seq_lens.np[:num_reqs] = seq_lens
    buffers.seq_lens.np[num_reqs:] = 0

    sampled = np.flatnonzero(seq_lens >= states.num_given[rows])
    buffers.logits_rows.np[: len(sampled)] = starts[sampled + 1] - 1
    longest = int(query_lens[-1]) if num_reqs else 0
    return InputBatch(
        request_ids=request_ids,
        rows=rows,
        seq_lens=seq_lens,
        token_rows=token_rows,
        token_positions=token_positions,
        sampled_places=sampled,
        prompt_rows=_find_prompt_rows(states, rows, computed, seq_lens, starts),
        num_tokens=num_tokens,
        max_query_len=longest,
        uniform_query_len=longest if num_reqs and query_lens[0] == longest else 0,
    )


def _find_prompt_rows(
    states: RequestStates, rows: np.ndarray, computed: np.ndarray, seq_lens: np.ndarray, starts: np.ndarray
) -> list[PromptRows]:
    """The token at position p predicts p + 1, so a chunk serves the positions behind it, up to the prompt's end."""
    wanted = states.sampling.num_prompt_logprobs[rows] != NO_LOGPROBS
    ends = np.minimum(seq_lens, states.num_prompt[rows] - 1)
    places = np.flatnonzero(wanted & (ends > computed)).tolist()
    return [
        PromptRows(place, int(starts[place]), int(computed[place]) + 1, int(ends[place] - computed[place]))
        for place in places
    ]
