"""The order in which the pipeline launches and samples."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from headrace.base.errors import EngineDeadError
from headrace.core.pipeline import Pipeline, StepFailedError
from headrace.executor.base import Executor, ExecutorReady
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput
from headrace.messages.scheduler_output import CachedRequests, GrammarOutput, KVActions, SchedulerOutput


def make_step(step_id: int, *, grammar: bool = False, tokens: int = 1) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        new=[],
        cached=CachedRequests(request_ids=[], num_computed_tokens=[], new_block_ids={}),
        num_scheduled_tokens={"r": tokens} if tokens else {},
        total_num_scheduled_tokens=tokens,
        finished=[],
        preempted=[],
        kv=KVActions(zero=[], copy=[]),
        spec={},
        grammar=["r"] if grammar else [],
        encoder={},
    )


class LoggingExecutor(Executor):
    """Answers at once and writes down what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.outcomes: list[ModelRunnerOutput | Exception] = []
        self.dead = False

    def start(self) -> ExecutorReady:
        raise NotImplementedError

    def initialize_kv_cache(self, config: KVCacheConfig) -> GraphSummary:
        raise NotImplementedError

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        self.calls.append(f"execute {step.step_id}")
        future: Future[ModelRunnerOutput | None] = Future()
        empty = ModelRunnerOutput(request_ids=[], sampled_token_ids=[])
        outcome = empty if step.grammar or not self.outcomes else self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(None if step.grammar and step.num_scheduled_tokens else outcome)
        return future

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        self.calls.append("sample" if grammar is None else "sample with mask")
        future: Future[ModelRunnerOutput] = Future()
        outcome = self.outcomes.pop(0) if self.outcomes else ModelRunnerOutput(request_ids=[], sampled_token_ids=[])
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return future

    def control(self, request: AnyControl) -> Any:
        raise NotImplementedError

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("gone")

    def shutdown(self) -> None:
        raise NotImplementedError


@pytest.fixture
def executor() -> LoggingExecutor:
    return LoggingExecutor()


def make_pipeline(executor: LoggingExecutor, depth: int) -> Pipeline:
    def make_bitmask(step: SchedulerOutput) -> GrammarOutput:
        executor.calls.append(f"mask {step.step_id}")
        return GrammarOutput(request_ids=step.grammar, bitmask=b"", num_words=0)

    return Pipeline(executor, depth, make_bitmask)


def test_depth_one_has_room_only_when_empty(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 1)
    pipeline.launch(make_step(0))
    assert not pipeline.has_room
    assert pipeline.take_oldest() is not None
    assert pipeline.has_room
    assert pipeline.take_oldest() is None


def test_steps_without_grammar_rows_are_one_call_each(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 3)
    for step_id in range(3):
        assert pipeline.has_room
        pipeline.launch(make_step(step_id))
    assert not pipeline.has_room
    assert executor.calls == ["execute 0", "execute 1", "execute 2"]


def test_a_mask_is_made_while_the_forward_runs_when_nothing_is_ahead(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 2)
    pipeline.launch(make_step(0, grammar=True))
    assert executor.calls == ["execute 0", "mask 0", "sample with mask"]
    assert pipeline.has_room


def test_grammar_rows_wait_for_the_commit_before_them_and_hold_up_what_follows(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 3)
    pipeline.launch(make_step(0))
    pipeline.launch(make_step(1, grammar=True))
    assert executor.calls[-1] == "execute 1"
    assert not pipeline.has_room, "a forward behind it would overtake its sampling"
    assert pipeline.take_oldest() is not None
    pipeline.committed()
    assert executor.calls[-2:] == ["mask 1", "sample with mask"]
    assert pipeline.has_room


def test_a_step_without_tokens_is_not_sampled(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 2)
    pipeline.launch(make_step(0, tokens=0))
    flight = pipeline.take_oldest()
    assert flight is not None
    assert pipeline.wait(flight).request_ids == []
    assert executor.calls == ["execute 0"]


def test_a_failed_step_and_a_dead_executor_are_told_apart(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 1)
    executor.outcomes = [RuntimeError("bad row")]
    pipeline.launch(make_step(0))
    flight = pipeline.take_oldest()
    assert flight is not None
    with pytest.raises(StepFailedError, match="bad row"):
        pipeline.wait(flight)
    executor.dead = True
    with pytest.raises(EngineDeadError, match="gone"):
        pipeline.wait(flight)


def test_what_is_abandoned_runs_out_and_the_connector_s_news_survive(executor: LoggingExecutor) -> None:
    pipeline = make_pipeline(executor, 3)
    news = ConnectorOutput(finished_receiving=("a",))
    executor.outcomes = [
        ModelRunnerOutput(request_ids=[], sampled_token_ids=[], connector=news),
        RuntimeError("to be dropped"),
    ]
    pipeline.launch(make_step(0))
    pipeline.launch(make_step(1, grammar=True))
    pipeline.abandon()
    assert executor.calls == ["execute 0", "execute 1", "sample"]
    assert len(pipeline) == 0
    last = ConnectorOutput(finished_receiving=("b",))
    executor.outcomes = [ModelRunnerOutput(request_ids=[], sampled_token_ids=[], connector=last)]
    pipeline.launch(make_step(2))
    flight = pipeline.take_oldest()
    assert flight is not None
    assert pipeline.wait(flight).connector == ConnectorOutput(finished_receiving=("a", "b"))
