"""Rows and block tables against dictionaries, over random histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.device.runner.block_tables import BlockTables
from headrace.device.runner.request_states import RequestStates
from headrace.messages.sampling_params import SamplingParams
from headrace.messages.scheduler_output import NewRequest

ROWS, WIDTH, VOCAB = 4, 40, 31
SIZES = (4, 8)


class Known:
    """What a request must look like."""

    def __init__(self, tokens: list[int], num_prompt: int, penalty: float, blocks: list[list[int]]) -> None:
        self.tokens, self.num_prompt, self.penalty, self.blocks = tokens, num_prompt, penalty, blocks
        self.given = len(tokens)


class RowsMachine(RuleBasedStateMachine):
    """Add, sample, go back, preempt, resume, finish."""

    def __init__(self) -> None:
        super().__init__()
        self.states = RequestStates(ROWS, WIDTH, VOCAB)
        self.tables = BlockTables(ROWS, WIDTH + 1, SIZES)
        self.known: dict[str, Known] = {}
        self.parked: dict[str, Known] = {}
        self.made = 0
        self.next_block = 1

    def _new_blocks(self, count: int) -> list[int]:
        ids = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        return ids

    def _send(self, name: str, known: Known) -> None:
        known.given = len(known.tokens)
        known.blocks = [self._new_blocks(-(-len(known.tokens) // size)) for size in SIZES]
        row = self.states.add(
            NewRequest(
                request_id=name,
                token_ids=list(known.tokens),
                num_prompt_tokens=known.num_prompt,
                num_computed_tokens=0,
                block_ids=tuple(known.blocks),
                sampling=SamplingParams(seed=1, repetition_penalty=known.penalty),
            )
        )
        self.tables.stage_row(row, tuple(known.blocks))
        self.tables.apply_staged()
        self.known[name] = known

    @precondition(lambda self: len(self.known) < ROWS)
    @rule(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), penalty=st.sampled_from([1.0, 1.3]))
    def add(self, tokens: list[int], penalty: float) -> None:
        self.made += 1
        self._send(f"r{self.made}", Known(tokens, len(tokens), penalty, []))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), token=st.integers(0, VOCAB - 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        if len(known.tokens) >= WIDTH:
            return
        row, position = self.states.row(name), len(known.tokens)
        grown: list[list[int]] = []
        for size, blocks in zip(SIZES, known.blocks, strict=True):
            grown.append(self._new_blocks(max(0, -(-(position + 1) // size) - len(blocks))))
            blocks.extend(grown[-1])
        for _ in range(data.draw(st.integers(1, 2))):
            self.tables.stage_append(row, tuple(grown), position)
            self.tables.apply_staged()
        extras = self.states.sampling.extras[row]
        if extras is not None and extras.penalties is not None:
            extras.penalties.move_to(self.states.token_ids[row], position)
            output = known.tokens[known.num_prompt :]
            assert extras.penalties.counts.tolist() == np.bincount(output, minlength=VOCAB).tolist()
        self.states.write_sampled(row, position, token)
        known.tokens.append(token)

    @precondition(lambda self: any(len(k.tokens) > k.given for k in self.known.values()))
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """The last steps run again; blocks stay."""
        name = data.draw(st.sampled_from(sorted(n for n, k in self.known.items() if len(k.tokens) > k.given)))
        known = self.known[name]
        del known.tokens[data.draw(st.integers(known.given, len(known.tokens) - 1)) :]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.states.remove(name)
        self.parked[name] = self.known.pop(name)

    @precondition(lambda self: self.parked and len(self.known) < ROWS)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.parked)))
        self._send(name, self.parked.pop(name))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        del self.known[name]
        self.states.remove(name)
        self.states.remove(name)

    @invariant()
    def rows_hold_what_is_known(self) -> None:
        self.states.check_invariants()
        assert len(self.states) == len(self.known)
        for name, known in self.known.items():
            row = self.states.row(name)
            assert self.states.token_ids[row, : len(known.tokens)].tolist() == known.tokens
            assert self.states.num_prompt[row] == known.num_prompt
            assert self.states.num_given[row] == known.given
            extras = self.states.sampling.extras[row]
            assert (extras is not None) == (known.penalty != 1.0)
            for group, blocks in enumerate(known.blocks):
                assert self.tables.num_blocks[group, row] == len(blocks)
                assert self.tables.tables[group][row, : len(blocks)].tolist() == blocks


RowsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRows = RowsMachine.TestCase


def test_a_block_may_come_back_to_its_row() -> None:
    """A window's old block, freed and given to the same request again, is not taken for one that is there already."""
    tables = BlockTables(1, 40, (4,))
    tables.stage_row(0, ([5, 6, 7],))
    tables.stage_append(0, ([5],), 12)
    tables.apply_staged()
    assert tables.tables[0][0, :4].tolist() == [5, 6, 7, 5]


def test_too_many_blocks_and_rows_raise() -> None:
    tables = BlockTables(1, 8, (4,))
    tables.stage_row(0, ([1, 2, 3],))
    with pytest.raises(RuntimeError, match="do not fit"):
        tables.apply_staged()
    states = RequestStates(1, 8, VOCAB)
    request = NewRequest(
        request_id="a",
        token_ids=[1],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=([1],),
        sampling=SamplingParams(seed=0),
    )
    assert states.add(request) == states.add(request) == 0
    with pytest.raises(RuntimeError, match="rows are taken"):
        states.add(NewRequest(**{f: getattr(request, f) for f in request.__struct_fields__} | {"request_id": "b"}))
