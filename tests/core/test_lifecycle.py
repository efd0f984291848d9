"""The lifecycle table: every move is legal or refused by name, and nothing is a dead end but STOPPED."""

from __future__ import annotations

import pytest

from headrace.base.errors import NotAcceptingError
from headrace.core.lifecycle import (
    MOVES,
    CoreState,
    Verb,
    admits,
    next_state,
    runs_steps,
)


def test_only_ready_admits_and_only_ready_and_draining_run() -> None:
    assert [s for s in CoreState if admits(s)] == [CoreState.READY]
    assert [s for s in CoreState if runs_steps(s)] == [
        CoreState.READY,
        CoreState.DRAINING,
    ]


@pytest.mark.parametrize("state", list(CoreState))
@pytest.mark.parametrize("verb", list(Verb))
def test_a_verb_moves_as_the_table_says_or_is_refused_with_what_is_possible(state: CoreState, verb: Verb) -> None:
    if (state, verb) in MOVES:
        assert next_state(state, verb) is MOVES[state, verb]
        return
    with pytest.raises(
        NotAcceptingError,
        match=f"{state.value} and cannot {verb.value}; possible: .*stop",
    ):
        next_state(state, verb)


def test_every_state_can_stop_and_stopped_is_final() -> None:
    for state in CoreState:
        assert next_state(state, Verb.STOP) is CoreState.STOPPED
    assert {v for s, v in MOVES if s is CoreState.STOPPED} == {Verb.STOP}
