"""The inputs of one step: which requests stand where, and the token ids and positions that the forward reads.

Batch order: decode-like rows first, then short extends, then long prefills (a stable sort by scheduled tokens),
whatever order they were scheduled in. All tensors are views from the start of persistent buffers, so their addresses
never change and a captured graph can read them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from headrace.device.ops.interface import StepInputs, StepMemory, TableMemory
from headrace.device.runner.block_tables import BlockTables
from headrace.device.runner.graphs import MAX_LOGIT_ROWS, HeadRows
from headrace.device.runner.request_states import RequestStates
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


@dataclass(slots=True)
class SampledRows:
    """Who is sampled in a step, first those that need no more than their best token; nobody changes it.

    Attributes:
        places, request_ids, rows: in the order of sampling.
        token_rows: the token row of each one's last token.
        num_best: that many, the first ones, need no logits.
        first_head: ``cut_head(0)``.
    """

    places: list[int]
    request_ids: list[str]
    rows: list[int]
    token_rows: list[int]
    num_best: int
    first_head: HeadRows = field(init=False)

    def __post_init__(self) -> None:
        self.first_head = self.cut_head(0)

    def cut_head(self, first: int) -> HeadRows:
        """The rows from ``first`` on whose head is run at once: as many as logits may be held."""
        end = max(first, self.num_best) + MAX_LOGIT_ROWS
        return HeadRows(self.token_rows[first:end], max(0, self.num_best - first))


@dataclass(slots=True)
class InputBatch:
    """One step in batch order, by place unless a line says otherwise.

    Lists and not arrays: a step has few requests, and each small array operation costs as much as a dozen of them. A
    step of the same streams as the one before shares its lists, so nobody changes them.

    Attributes:
        rows: ``req_idx`` (the ``idx_mapping``).
        query_lens: tokens computed in this step.
        seq_lens: tokens computed after this step.
        lora_names: adapters.
        sampled: places whose last known token is computed in this step.
        prompt_rows: prompt log-probabilities to compute.
        uniform_query_len: the query length of every place, or 0 when they differ.
    """

    request_ids: list[str]
    rows: list[int]
    query_lens: list[int]
    seq_lens: list[int]
    lora_names: list[str | None]
    sampled: SampledRows
    prompt_rows: list[PromptRows]
    num_tokens: int
    max_query_len: int
    uniform_query_len: int

    @property
    def num_reqs(self) -> int:
        """Requests of the step."""
        return len(self.request_ids)


def prepare_inputs(
    step: SchedulerOutput, states: RequestStates, inputs: StepInputs, before: InputBatch | None
) -> InputBatch:
    """Fill the buffers for a step whose rows and tables are up to date.

    Args:
        before: the step before, if nothing has failed since.
    """
    if before is not None and _goes_on(step, before):
        return _advance(before, step.cached.num_computed_tokens, inputs)
    computed_of = dict(zip(step.cached.request_ids, step.cached.num_computed_tokens, strict=True))
    for request in step.new:
        computed_of[request.request_id] = request.num_computed_tokens
    request_ids, query_lens = list(step.num_scheduled_tokens), list(step.num_scheduled_tokens.values())
    shortest, longest = min(query_lens), max(query_lens)
    if shortest != longest:
        order = sorted(range(len(query_lens)), key=query_lens.__getitem__)
        request_ids, query_lens = [request_ids[i] for i in order], [query_lens[i] for i in order]
    rows = [states.row(request_id) for request_id in request_ids]
    computed = [computed_of[request_id] for request_id in request_ids]
    num_tokens = inputs.fill(rows, computed, query_lens)
    seq_lens = [had + count for had, count in zip(computed, query_lens, strict=True)]
    batch = InputBatch(
        request_ids=request_ids,
        rows=rows,
        query_lens=query_lens,
        seq_lens=seq_lens,
        lora_names=[states.lora_names[row] for row in rows],
        sampled=_NOBODY,
        prompt_rows=_find_prompt_rows(states, rows, computed, seq_lens),
        num_tokens=num_tokens,
        max_query_len=longest,
        uniform_query_len=longest if shortest == longest else 0,
    )
    batch.sampled = _find_sampled(batch, states, frozenset(step.grammar))
    return batch


_NOBODY = SampledRows([], [], [], [], 0)


def _goes_on(step: SchedulerOutput, before: InputBatch) -> bool:
    """Whether a step is another token for each of the streams of the step before, which sampled all of them."""
    return (
        before.uniform_query_len == 1
        and before.num_reqs == step.total_num_scheduled_tokens == len(before.sampled.places)
        and not (step.new or step.preempted or step.grammar)
        and step.cached.request_ids == before.request_ids
        and len(step.num_scheduled_tokens) == before.num_reqs
    )


def _advance(before: InputBatch, computed: list[int], inputs: StepInputs) -> InputBatch:
    """The next step of the same streams: they stand where they stood, and their prompts are behind them."""
    inputs.fill(before.rows, computed, before.query_lens)
    return InputBatch(
        request_ids=before.request_ids,
        rows=before.rows,
        query_lens=before.query_lens,
        seq_lens=[had + 1 for had in computed],
        lora_names=before.lora_names,
        sampled=before.sampled,
        prompt_rows=[],
        num_tokens=before.num_tokens,
        max_query_len=1,
        uniform_query_len=1,
    )


def _find_sampled(batch: InputBatch, states: RequestStates, masked: Collection[str]) -> SampledRows:
    """``masked`` are the requests under a grammar."""
    given, takes_best = states.num_given, states.sampling.takes_best
    best: list[int] = []
    others: list[int] = []
    for place, row in enumerate(batch.rows):
        if batch.seq_lens[place] < given[row]:
            continue
        (best if takes_best[row] and batch.request_ids[place] not in masked else others).append(place)
    places = best + others
    ends = list(accumulate(batch.query_lens))
    return SampledRows(
        places=places,
        request_ids=[batch.request_ids[place] for place in places],
        rows=[batch.rows[place] for place in places],
        token_rows=[ends[place] - 1 for place in places],
        num_best=len(best),
    )


def _find_prompt_rows(
    states: RequestStates, rows: list[int], computed: list[int], seq_lens: list[int]
) -> list[PromptRows]:
    """The token at position p predicts p + 1, so a chunk serves the positions behind it, up to the prompt's end."""
    asking = states.sampling.prompt_logprobs_rows
    if not asking:
        return []
    found, first = [], 0
    for place, (row, begin, end) in enumerate(zip(rows, computed, seq_lens, strict=True)):
        stop = min(end, int(states.num_prompt[row]) - 1)
        if row in asking and stop > begin:
            found.append(PromptRows(place, first, begin + 1, stop - begin))
        first += end - begin
    return found
