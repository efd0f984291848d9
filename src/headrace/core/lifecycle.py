"""The life of an engine core as a pure table: which verb is legal in which state, and where it leads.

Owns no state; `EngineCore` keeps the current one and asks here. A verb that is not in a state's row is refused with a
message that says what the state is and what would be legal.

Invariants: every state but STOPPED can reach STOPPED; only READY admits requests; steps run in READY and DRAINING.
"""

from __future__ import annotations

from enum import Enum

from headrace.base.errors import NotAcceptingError


class CoreState(str, Enum):
    """Where a core is in its life."""

    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    RELOADING = "reloading"
    STOPPED = "stopped"


class Verb(str, Enum):
    """What moves a core from state to state."""

    DRAIN = "drain"
    SLEEP = "sleep"
    WAKE = "wake"
    RELOAD = "reload"
    RELOADED = "reloaded"
    STOP = "stop"


MOVES: dict[tuple[CoreState, Verb], CoreState] = {
    (CoreState.READY, Verb.DRAIN): CoreState.DRAINING,
    (CoreState.DRAINING, Verb.DRAIN): CoreState.DRAINING,
    (CoreState.READY, Verb.SLEEP): CoreState.SLEEPING,
    (CoreState.SLEEPING, Verb.SLEEP): CoreState.SLEEPING,
    (CoreState.SLEEPING, Verb.WAKE): CoreState.READY,
    (CoreState.READY, Verb.WAKE): CoreState.READY,
    (CoreState.READY, Verb.RELOAD): CoreState.RELOADING,
    (CoreState.RELOADING, Verb.RELOADED): CoreState.READY,
    **{(state, Verb.STOP): CoreState.STOPPED for state in CoreState},
}


def next_state(state: CoreState, verb: Verb) -> CoreState:
    """The state after ``verb``; raises `NotAcceptingError` for a verb that ``state`` does not take."""
    try:
        return MOVES[state, verb]
    except KeyError:
        legal = ", ".join(v.value for s, v in MOVES if s is state)
        raise NotAcceptingError(f"the engine is {state.value} and cannot {verb.value}; possible: {legal}") from None


def admits(state: CoreState) -> bool:
    """Whether new requests are taken."""
    return state is CoreState.READY


def runs_steps(state: CoreState) -> bool:
    """Whether the loop schedules steps."""
    return state in (CoreState.READY, CoreState.DRAINING)
