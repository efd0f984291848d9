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

from headrace.device.ops.interface import StepInputs, StepMemory, TableMemory
from headrace.device.runner.block_tables import BlockTables
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
        self.block_tables = [Buffer((max_reqs, width), torch.int32) for width in max_blocks]
        self.slot_mappings = [Buffer((max_tokens,), torch.int64) for _ in max_blocks]

    def memory(self, token_ids: np.ndarray, tables: BlockTables) -> StepMemory:
        """What a step is read from and where it goes."""
        parts = zip(
            tables.tables, tables.num_blocks, tables.block_sizes, self.block_tables, self.slot_mappings, strict=True
        )
        return StepMemory(
            token_ids,
            self.ids.np,
            self.positions.np,
            self.query_start_loc.np,
            self.seq_lens.np,
            tuple(TableMemory(table, count, size, step.np, slots.np) for table, count, size, step, slots in parts),
        )


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
    """One step in batch order; arrays are the step's own.

    Attributes:
        request_ids: by place.
        rows: ``req_idx`` by place (the ``idx_mapping``).
        seq_lens: tokens computed after this step, by place.
        last_tokens: int32, the token row of each place's last token.
        sampled_places: places whose last known token is computed in this step, ascending.
        prompt_rows: prompt log-probabilities to compute.
        uniform_query_len: the query length of every place, or 0 when they differ.
    """

    request_ids: list[str]
    rows: np.ndarray
    seq_lens: np.ndarray
    last_tokens: np.ndarray
    sampled_places: np.ndarray
    prompt_rows: list[PromptRows]
    num_tokens: int
    max_query_len: int
    uniform_query_len: int

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return len(self.request_ids)


def prepare_inputs(step: SchedulerOutput, states: RequestStates, inputs: StepInputs) -> InputBatch:
    """Fill the buffers for a step whose rows and tables are up to date."""
    computed_of = dict(zip(step.cached.request_ids, step.cached.num_computed_tokens, strict=True))
    for request in step.new:
        computed_of[request.request_id] = request.num_computed_tokens
    request_ids, counts = list(step.num_scheduled_tokens), list(step.num_scheduled_tokens.values())
    shortest, longest = min(counts), max(counts)
    if shortest != longest:
        order = sorted(range(len(counts)), key=counts.__getitem__)
        request_ids, counts = [request_ids[i] for i in order], [counts[i] for i in order]
    rows = np.array([states.row(r) for r in request_ids], dtype=np.int64)
    computed = np.array([computed_of[r] for r in request_ids], dtype=np.int64)
    query_lens = np.array(counts, dtype=np.int64)
    num_tokens = inputs.fill(rows, computed, query_lens)
    seq_lens = computed + query_lens
    ends = query_lens.cumsum()
    return InputBatch(
        request_ids=request_ids,
        rows=rows,
        seq_lens=seq_lens,
        last_tokens=(ends - 1).astype(np.int32),
        sampled_places=np.flatnonzero(seq_lens >= states.num_given[rows]),
        prompt_rows=_find_prompt_rows(states, rows, computed, seq_lens, ends - query_lens),
        num_tokens=num_tokens,
        max_query_len=longest,
        uniform_query_len=longest if shortest == longest else 0,
    )


def _find_prompt_rows(
    states: RequestStates, rows: np.ndarray, computed: np.ndarray, seq_lens: np.ndarray, starts: np.ndarray
) -> list[PromptRows]:
    """The token at position p predicts p + 1, so a chunk serves the positions behind it, up to the prompt's end."""
    wanted = states.sampling.num_prompt_logprobs[rows] != NO_LOGPROBS
    if not wanted.any():
        return []
    ends = np.minimum(seq_lens, states.num_prompt[rows] - 1)
    places = np.flatnonzero(wanted & (ends > computed)).tolist()
    return [
        PromptRows(place, int(starts[place]), int(computed[place]) + 1, int(ends[place] - computed[place]))
        for place in places
    ]
