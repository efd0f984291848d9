"""Order, budgets, watermark, forward progress, and what the recorder and event sinks are told."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.control.kv_cache.events import BlockStored
from headrace.control.scheduler.budget import StepCost
from headrace.control.scheduler.recorder import NullStepRecorder
from headrace.messages.outputs import FinishReason
from tests.control.driver import Driver
from tests.control.fake_runner import BLOCK, EventLog, expected_tokens, make_kv, make_request


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 131 + i * 17) % 997 for i in range(length)]


class Log(NullStepRecorder):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_queued(self, *call: Any) -> None:
        self.calls.append(("queued", *call))

    def on_waiting(self, *call: Any) -> None:
        self.calls.append(("waiting", *call))

    def on_admitted(self, *call: Any) -> None:
        self.calls.append(("admitted", *call))

    def on_preempted(self, *call: Any) -> None:
        self.calls.append(("preempted", *call))

    def on_step(self, *call: Any) -> None:
        self.calls.append(("step", *call))

    def on_committed(self, *call: Any) -> None:
        self.calls.append(("committed", *call))

    def on_finished(self, *call: Any) -> None:
        self.calls.append(("finished", *call))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


def test_priority_orders_by_number_then_arrival_then_order() -> None:
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    for request_id, priority, arrival in [("a", 1, 0.0), ("b", 0, 3.0), ("c", 0, 2.0), ("d", -1, 9.0), ("e", 0, 2.0)]:
        driver.add(make_request(request_id, prompt(ord(request_id), 5), 2, priority=priority, arrival=arrival))
    driver.run()
    assert list(driver.ended) == ["d", "c", "e", "b", "a"]


def test_fcfs_ignores_priority() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(*[make_request(f"r{i}", prompt(i, 5), 2, priority=-i) for i in range(4)])
    driver.run()
    assert list(driver.ended) == ["r0", "r1", "r2", "r3"]


def test_admission_does_not_preempt() -> None:
    driver = Driver(make_kv(17), scheduling_policy="priority", max_num_seqs=4)
    low = make_request("low", prompt(1, 40), 10, priority=9)
    driver.add(low)
    driver.turn()
    driver.add(make_request("high", prompt(2, 40), 2, priority=0))
    driver.run()
    assert driver.scheduler.make_stats().num_preemptions == 0
    assert list(driver.ended) == ["low", "high"]


def test_both_budgets_hold() -> None:
    driver = Driver(max_num_batched_tokens=20, max_num_scheduled_tokens=10)
    driver.add(*[make_request(f"r{i}", prompt(i, 15), 3) for i in range(3)])
    driver.run()
    assert max(step.total_num_scheduled_tokens for step in driver.steps) == 10
    drafting = Driver(max_num_batched_tokens=20, num_draft_tokens=3)
    drafting.add(*[make_request(f"r{i}", prompt(i, 3), 3) for i in range(5)])
    drafting.turn()
    # Each request is charged its three tokens and three slots for drafts.
    assert len(drafting.steps[0].num_scheduled_tokens) == 3
    assert sum(n + 3 for n in drafting.steps[0].num_scheduled_tokens.values()) <= 20


def test_the_whole_prompt_must_fit_beside_the_prompts_that_run() -> None:
    driver = Driver(make_kv(25), max_num_batched_tokens=8)
    a, b = make_request("a", prompt(1, 60), 2), make_request("b", prompt(2, 50), 2)
    driver.add(a, b)
    driver.run()
    assert driver.scheduler.make_stats().num_preemptions == 0, "b would have taken blocks that a's chunks need"
    assert driver.tokens["b"] == expected_tokens(b, 64)


def test_the_watermark_keeps_a_victim_from_coming_back_at_once() -> None:
    preemptions = []
    for watermark in (0.0, 0.25):
        driver = Driver(make_kv(25), watermark=watermark)
        driver.add(*[make_request(f"r{i}", prompt(i, 12), 50) for i in range(6)])
        driver.run()
        preemptions.append(driver.scheduler.make_stats().num_preemptions)
    assert preemptions[1] < preemptions[0]


def test_the_recorder_hears_who_took_whose_blocks() -> None:
    log = Log()
    driver = Driver(make_kv(17), recorder=log)
    driver.add(make_request("old", prompt(1, 28), 30), make_request("new", prompt(2, 28), 30))
    driver.run()
    assert [call[0].request_id for call in log.of("queued")] == ["old", "new"]
    victim, cause, beneficiary, _ = log.of("preempted")[0]
    assert (victim, cause.value, beneficiary) == ("new", "no_blocks", "old")
    admitted = log.of("admitted")
    assert [(call[0], call[4]) for call in admitted] == [("old", False), ("new", False), ("new", True)]
    assert all(call[3] is not None for call in admitted), "the first missed block is named"
    steps = log.of("step")
    assert [call[0].step_id for call in steps] == list(range(len(steps)))
    moved = [call[1] for kind in ("step", "committed") for call in log.of(kind)]
    pool = driver.scheduler.kv.pool
    assert sum(c.taken for c in moved) == pool.num_taken and sum(c.cached for c in moved) == pool.num_stored
    assert sum(c.evicted for c in moved) == pool.num_evicted > 0
    assert [call[:3] for call in log.of("finished")] == [
        ("old", FinishReason.LENGTH, 30),
        ("new", FinishReason.LENGTH, 30),
    ]


def test_a_wait_is_recorded_when_its_reason_changes() -> None:
    log = Log()
    driver = Driver(max_num_seqs=1, recorder=log)
    driver.add(make_request("a", prompt(1, 5), 10), make_request("b", prompt(2, 5), 2))
    driver.run()
    assert [(call[0], call[1].value) for call in log.of("waiting")] == [("b", "running_limit")]


def test_events_name_blocks_in_chain_order() -> None:
    events = EventLog()
    driver = Driver(events=events)
    driver.add(make_request("a", prompt(1, 10), 4, salt="s"))
    driver.run()
    stored = [event for event in events.events if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in stored] == [2, 1]
    assert stored[0].parent_hash is None and stored[1].parent_hash == stored[0].block_hashes[-1]
    assert list(stored[0].token_ids) == prompt(1, 8)
    assert stored[0].block_size == BLOCK and stored[0].extra_keys == (("salt", "s"),)


def test_nothing_ready_stalls_in_silence() -> None:
    """A pool that lost its blocks (a fault) fails the head with a reason instead of waiting for ever."""
    driver = Driver(make_kv(17))
    driver.scheduler.kv.pool.take(14)
    driver.scheduler.add_request(make_request("r", prompt(1, 30), 5), 0.0)
    step = driver.scheduler.schedule(0.0)
    assert not step.num_scheduled_tokens
    (message,) = driver.scheduler.take_outputs().values()
    assert message.outputs[0].finish_reason is FinishReason.ERROR and "room" in (message.outputs[0].error or "")
    assert not driver.scheduler.has_unfinished


def test_an_empty_step_is_not_in_flight_and_loses_no_row() -> None:
    driver = Driver()
    driver.add(make_request("a", prompt(1, 5), 10))
    driver.turn()
    driver.finish(["a"])
    assert driver.schedule() is None
    driver.add(make_request("b", prompt(2, 5), 1))
    driver.turn()
    assert driver.steps[-1].finished == ["a"]


def test_only_legal_reasons_end_a_request_from_outside() -> None:
    driver = Driver()
    driver.add(make_request("a", prompt(1, 5), 10))
    with pytest.raises(ValueError, match="stop"):
        driver.scheduler.finish_requests(["a"], FinishReason.STOP)


def test_step_cost_learns_base_and_price() -> None:
    cost = StepCost()
    assert cost.max_prompt_tokens(1.0, 16) == 64, "before it knows anything it goes carefully"
    for _ in range(60):
        cost.record(0.02, 0)
        cost.record(0.02 + 0.0005 * 100, 100)
    assert abs(cost.max_prompt_tokens(0.07, 16) - 100) <= 1
    assert cost.max_prompt_tokens(0.001, 16) == 16, "prompts always advance"
    cost.record(0.0, 5)
