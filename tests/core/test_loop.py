"""One turn of the loop: what it waits for, what it hands on, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import EngineDeadError
from headrace.base.progress import ProgressWord
from headrace.core.engine_core import EngineCore
from headrace.core.loop import IDLE_S, STALLED_S, CoreLoop, Inbox
from headrace.messages.outputs import EngineCoreOutputs, FinishReason
from headrace.messages.requests import Abort, Query, Stop
from headrace.testing.engine_config import make_engine_config
from headrace.testing.fake_connector import FakeConnector, FakeHits, FakeWorkerConnector
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor


class ImpatientInbox(Inbox):
    """Notes how long it was asked to wait, and does not."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.waits: list[float] = []

    def take(self, timeout_s: float) -> list[tuple[int, Any]]:
        self.waits.append(timeout_s)
        messages = super().take(0.0)
        if not messages and timeout_s == IDLE_S:
            self.put(0, Stop())
        return messages


class Driven:
    """A core with its loop and everything that it sent."""

    def __init__(self, hits: FakeHits | None = None, at_rest: Sequence[Callable[[], None]] = ()) -> None:
        config = make_engine_config(pipeline_depth=2)
        clock = ManualClock()
        self.executor = SimulatedExecutor(config, clock=clock, connector=FakeWorkerConnector())
        connector = FakeConnector(3, hits) if hits is not None else None
        self.core = EngineCore(config, self.executor, clock, connector=connector, at_rest=at_rest)
        self.inbox = ImpatientInbox(self.core)
        self.sent: list[EngineCoreOutputs] = []
        self.progress = ProgressWord()
        self.loop = CoreLoop(self.core, self.inbox, lambda _, outputs: self.sent.append(outputs), self.progress)

    @property
    def ends(self) -> dict[str, FinishReason]:
        return {o.request_id: o.finish_reason for m in self.sent for o in m.outputs if o.finish_reason is not None}


def test_it_never_waits_while_there_is_work_and_sleeps_when_there_is_none() -> None:
    driven = Driven()
    driven.inbox.put(0, make_request("r", max_tokens=6))
    driven.loop.run()
    assert driven.ends == {"r": FinishReason.LENGTH}
    idle = [i for i, wait in enumerate(driven.inbox.waits) if wait == IDLE_S]
    assert idle[0] == 0
    assert set(driven.inbox.waits[1 : idle[1]]) == {0.0}
    assert driven.progress.read() == len(driven.inbox.waits)


def test_what_was_put_off_begins_once_and_only_at_rest() -> None:
    seen: list[dict[str, FinishReason]] = []
    driven = Driven(at_rest=[lambda: seen.append(driven.ends)])
    driven.inbox.put(0, make_request("r", max_tokens=6))
    driven.loop.run()
    driven.core.rest()
    assert seen == [{"r": FinishReason.LENGTH}]


def test_it_waits_a_little_when_nothing_can_run() -> None:
    hits = FakeHits(share=1.0, undecided=0.0, is_async=1.0, fates=("good",), max_steps=5)
    driven = Driven(hits)
    driven.inbox.put(0, make_request("r", prompt=40, max_tokens=3))
    driven.loop.run()
    assert driven.ends == {"r": FinishReason.LENGTH}
    assert STALLED_S in driven.inbox.waits


def test_an_abort_that_overtakes_its_request_still_ends_it() -> None:
    driven = Driven()
    driven.inbox.put(0, Abort(request_ids=["r"]))
    driven.core.step()
    driven.inbox.put(0, make_request("r", max_tokens=50))
    driven.inbox.put(0, Abort(request_ids=["r"]))
    driven.core.step()
    driven.loop.run()
    assert driven.ends == {"r": FinishReason.ABORT}


def test_messages_are_applied_in_order_and_answered() -> None:
    driven = Driven()
    driven.inbox.put(0, make_request("r", max_tokens=2))
    driven.inbox.put(0, Query(topic="state", call_id=1))
    driven.loop.turn(0.0)
    (reply,) = [reply for message in driven.sent for reply in message.replies]
    assert reply.value == {"state": "ready", "num_unfinished": 1}


def test_a_dead_worker_is_noticed_when_idle() -> None:
    driven = Driven()
    driven.executor.kill("a worker died in its sleep")
    with pytest.raises(EngineDeadError, match="in its sleep"):
        driven.loop.run()


def test_an_inbox_that_failed_ends_the_loop() -> None:
    driven = Driven()
    driven.inbox.fail("unreadable")
    with pytest.raises(EngineDeadError, match="unreadable"):
        driven.loop.run()
