"""One request that breaks a step ends alone; the others get the tokens of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import EngineDeadError
from headrace.core import recovery
from headrace.core.engine_core import EngineCore
from headrace.messages.outputs import EngineCoreOutput, FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.testing.engine_config import make_engine_config
from headrace.testing.faults import FaultPlan
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor, StepCost
from headrace.testing.tokens import expected_output

VOCAB, MAX_LEN = 1000, 128


def make_core(depth: int, clock: ManualClock | None = None, **options: Any) -> tuple[EngineCore, SimulatedExecutor]:
    config = make_engine_config(pipeline_depth=depth, max_model_len=MAX_LEN, num_kv_blocks=400)
    used = clock or ManualClock()
    executor = SimulatedExecutor(config, clock=used, **options)
    return EngineCore(config, executor, used), executor


def run(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, tuple[list[int], EngineCoreOutput]]:
    """Run requests to their end; returns tokens and last output of each."""
    for request in requests:
        core.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, EngineCoreOutput] = {}
    for _ in range(2000):
        if not core.has_work:
            break
        for outputs in core.step().values():
            for output in outputs.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    assert output.request_id not in ends
                    ends[output.request_id] = output
        core.scheduler.check_invariants()
    return {key: (tokens[key], ends[key]) for key in tokens}


def check_undisturbed(request: EngineCoreRequest, tokens: list[int], end: EngineCoreOutput) -> None:
    expected = expected_output(request, vocab_size=VOCAB, max_model_len=MAX_LEN)
    assert tokens == expected.token_ids
    assert end.finish_reason is expected.finish_reason


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("phase", ["forward", "sample", "logits"])
@pytest.mark.parametrize("at", [0, 9])
def test_only_the_culprit_ends(depth: int, lazy: bool, phase: str, at: int) -> None:
    core, executor = make_core(depth, lazy=lazy)
    requests = [make_request(f"r{i}", prompt=4 + i, max_tokens=12, seed=i) for i in range(7)]
    requests[3] = make_request("r3", prompt=6, max_tokens=12, seed=3, fault={"phase": phase, "at": at})
    ended = run(core, requests)
    for request in requests:
        tokens, end = ended[request.request_id]
        if request.fault is None:
            check_undisturbed(request, tokens, end)
            continue
        assert end.finish_reason is FinishReason.ERROR
        expected = expected_output(request, vocab_size=VOCAB, max_model_len=MAX_LEN).token_ids
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == max(0, at + 1 - 6)
    assert not executor.violations
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_usable


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("phase", ["forward", "sample"])
def test_a_fault_that_does_not_recur_ends_nobody(depth: int, phase: str) -> None:
    core, executor = make_core(depth)
    requests = [make_request(f"r{i}", prompt=4 + i, max_tokens=12, seed=i) for i in range(5)]
    requests[2] = make_request("r2", 5, 12, seed=2, fault={"phase": phase, "at": 8, "repeat": "once"})
    for request, (tokens, end) in zip(requests, run(core, requests).values(), strict=True):
        check_undisturbed(request, tokens, end)
    assert not executor.violations


@pytest.mark.parametrize("plan", [FaultPlan(fail_forward=frozenset({3})), FaultPlan(fail_sample=frozenset({3}))])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_fails_for_no_request_s_sake_counts(plan: FaultPlan, depth: int) -> None:
    core, executor = make_core(depth, faults=plan)
    requests = [make_request(f"r{i}", prompt=4 + i, max_tokens=12, seed=i) for i in range(5)]
    for request, (tokens, end) in zip(requests, run(core, requests).values(), strict=True):
        check_undisturbed(request, tokens, end)
    assert not executor.violations


def test_several_culprits_end_and_the_others_go_on() -> None:
    core, _ = make_core(2)
    fault = {"phase": "forward", "at": 10}
    requests = [make_request(f"r{i}", 8, 12, seed=i, fault=fault if i % 3 == 0 else None) for i in range(8)]
    ended = run(core, requests)
    assert [key for key, (_, end) in ended.items() if end.finish_reason is FinishReason.ERROR] == ["r0", "r3", "r6"]
    for request in requests:
        if request.fault is None:
            check_undisturbed(request, *ended[request.request_id])


def test_the_search_is_bounded_in_time() -> None:
    clock = ManualClock()
    core, _ = make_core(1, clock, cost=StepCost(per_step_s=20.0, per_token_s=0.0))
    requests = [make_request(f"r{i}", 4, 2, fault={"phase": "forward"}) for i in range(8)]
    ended = run(core, requests)
    assert all(end.finish_reason is FinishReason.ERROR for _, end in ended.values())
    assert clock.monotonic() < recovery.MAX_SECONDS + 60


def test_the_death_of_a_worker_is_not_searched_for_a_culprit() -> None:
    core, executor = make_core(2, faults=FaultPlan(die_at=2))
    with pytest.raises(EngineDeadError, match="a simulated worker died"):
        run(core, [make_request("r", max_tokens=20)])
    assert executor.num_forwards <= 4
