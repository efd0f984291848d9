"""The runner over a fake model, driven by a small scheduler that knows nothing of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.clock import ManualClock
from headrace.device.runner.faults import InjectedFaultError
from headrace.device.runner.graphs import BatchDescriptor
from headrace.device.runner.hooks import NullBatchSync, RunnerHooks
from headrace.device.runner.model_runner import ModelRunner
from headrace.kv_connector.null import NullWorkerConnector
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput
from headrace.messages.scheduler_output import CachedRequests, GrammarOutput, KVActions, SchedulerOutput
from tests.runner.driver import Driver, Job

VOCAB = 97
Logits = Callable[[list[int]], np.ndarray]
MakeRunner = Callable[..., ModelRunner]


class RunnerDriver(Driver):
    """Steps run on a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(self.run_step, groups=len(runner.tables.tables))
        self.runner = runner

    def run_step(self, step: SchedulerOutput, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        assert self.runner.execute_model(step) is None
        return self.runner.sample_tokens(grammar)


def plain_greedy(logits_after: Logits, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_joins_preemptions_and_reuse_change_no_token(
    make_runner: MakeRunner, logits_after: Logits, groups: int
) -> None:
    """Random grants over many requests; every request's tokens equal the plain loop."""
    rng = np.random.default_rng(groups)
    runner = make_runner(groups=groups, max_num_seqs=4)
    driver = RunnerDriver(runner)
    done: list[Job] = []
    active: list[Job] = []
    made = 0
    while len(done) < 25:
        while len(active) < 4 and made < 25:
            active.append(Job(f"r{made}", prompt_of(int(rng.integers(1, 20)), made)))
            made += 1
        for job in active:
            if job.running and rng.random() < 0.1:
                driver.preempt(job)
        chosen = [job for job in active if rng.random() < 0.8]
        grants = {job: int(rng.integers(1, len(job.tokens) - job.num_computed + 1)) for job in chosen}
        if not grants:
            continue
        driver.advance(grants)
        runner.states.check_invariants()
        for job in [job for job in active if len(job.tokens) >= 30]:
            driver.finish(job)
            active.remove(job)
            done.append(job)
    for job in done:
        assert job.tokens == plain_greedy(logits_after, job.tokens[: job.num_prompt], 30 - job.num_prompt)


def test_batch_order_is_decodes_extends_prefills(make_runner: MakeRunner) -> None:
    driver = RunnerDriver(make_runner())
    jobs = [Job(f"r{i}", prompt_of(20, i)) for i in range(4)]
    driver.advance({jobs[2]: 20})
    output = driver.advance({jobs[0]: 12, jobs[1]: 3, jobs[2]: 1, jobs[3]: 12})
    assert output.request_ids == ["r2", "r1", "r0", "r3"]
    assert [len(t) for t in output.sampled_token_ids] == [1, 0, 0, 0]


def test_running_a_step_again_gives_the_same(make_runner: MakeRunner) -> None:
    """In halves, after younger steps ran, with new rows and new blocks in it."""
    driver = RunnerDriver(make_runner())
    a = Job("a", prompt_of(7, 1), presence_penalty=0.5, repetition_penalty=1.2, temperature=0.8)
    b = Job("b", prompt_of(9, 2), frequency_penalty=0.7)
    driver.advance({a: 7})
    for _ in range(4):
        driver.advance({a: 1})
    step = driver.make_step({a: 1, b: 9})
    first = driver.run(step)
    younger = driver.make_step({a: 1, b: 1})
    second = driver.run(younger)
    table = driver.runner.tables.tables[0].copy()
    counts = driver.runner.tables.num_blocks.copy()

    half_a = msgspec.structs.replace(step, new=[], num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1)
    nobody = CachedRequests(request_ids=[], num_computed_tokens=[], new_block_ids={})
    half_b = msgspec.structs.replace(step, cached=nobody, num_scheduled_tokens={"b": 9}, total_num_scheduled_tokens=9)
    again = [driver.run(half_a), driver.run(half_b)]
    assert [o.sampled_token_ids[0] for o in again] == first.sampled_token_ids
    assert driver.run(younger).sampled_token_ids == second.sampled_token_ids
    assert np.array_equal(driver.runner.tables.tables[0], table)
    assert np.array_equal(driver.runner.tables.num_blocks, counts)


def test_the_next_forward_needs_no_host_token(make_runner: MakeRunner, logits_after: Logits) -> None:
    """Two steps in flight: the second is made before the first one's token is known outside."""
    driver = RunnerDriver(make_runner())
    job = Job("a", prompt_of(5))
    first = driver.make_step({job: 5})
    second = driver.make_step({job: 1})
    third = driver.make_step({job: 1})
    made = [driver.run(step).sampled_token_ids[0][0] for step in (first, second, third)]
    assert job.tokens + made == plain_greedy(logits_after, job.tokens, 3)


def test_streams_that_go_on_survive_a_step_that_fails(make_runner: MakeRunner, logits_after: Logits) -> None:
    """A fault between two steps of the same streams, and rows that change hands behind it."""
    runner = make_runner(max_num_seqs=3)
    driver = RunnerDriver(runner)
    a, b, c = Job("a", prompt_of(5, 1)), Job("b", prompt_of(6, 2)), Job("c", prompt_of(7, 3))
    prompts = {job: list(job.tokens) for job in (a, b, c)}
    driver.advance({a: 5, b: 6})
    for _ in range(3):
        driver.advance({a: 1, b: 1})
    driver.preempt(a)
    c.fault = {"phase": "forward", "repeat": "once"}
    step = driver.make_step({c: 7, a: len(a.tokens)})
    with pytest.raises(InjectedFaultError):
        driver.run(step)
    sampled = driver.run(step)
    for name, tokens in zip(sampled.request_ids, sampled.sampled_token_ids, strict=True):
        {"a": a, "c": c}[name].tokens += tokens
    for grants in ({b: 1, a: 1}, {b: 1, a: 1}, {a: 1, b: 1}, {c: 1, b: 1}, {c: 1, b: 1}):
        driver.advance(grants)
    for job, prompt in prompts.items():
        assert job.tokens == plain_greedy(logits_after, prompt, len(job.tokens) - len(prompt))


def test_prompt_logprobs_are_the_same_for_every_chunking(make_runner: MakeRunner, logits_after: Logits) -> None:
    prompt = prompt_of(50, 3)
    results = []
    for sizes in ([50], [1] * 50, [7, 20, 1, 22], [49, 1]):
        driver = RunnerDriver(make_runner())
        job, other = Job("a", prompt, prompt_logprobs=3, max_tokens=1), Job("b", prompt_of(4), prompt_logprobs=0)
        entries: list[Any] = []
        driver.advance({other: 4})
        for size in sizes:
            output = driver.advance({job: size})
            if "a" in output.prompt_logprobs:
                part = output.prompt_logprobs["a"]
                assert part.start == len(entries) + 1
                entries.extend(part.entries)
        results.append(entries)
        assert "a" not in driver.advance({job: 1}).prompt_logprobs
    assert all(r == results[0] for r in results)
    assert len(results[0]) == 49
    for i, entry in enumerate(results[0]):
        raw = logits_after(prompt[: i + 1]).astype(np.float64)
        reference = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        assert entry.token_ids[0] == prompt[i + 1] and len(entry.token_ids) == 4
        assert np.allclose(entry.logprobs, reference[entry.token_ids], atol=1e-5)


def test_one_token_prompt_has_no_prompt_logprobs(make_runner: MakeRunner) -> None:
    driver = RunnerDriver(make_runner())
    assert driver.advance({Job("a", [5], prompt_logprobs=1): 1}).prompt_logprobs == {}


def test_sampled_token_at_the_context_limit(make_runner: MakeRunner, logits_after: Logits) -> None:
    driver = RunnerDriver(make_runner(max_model_len=60))
    job = Job("a", prompt_of(60))
    driver.advance({job: 60})
    assert job.tokens == plain_greedy(logits_after, job.tokens[:60], 1)


def test_non_finite_logits_end_only_their_request(make_runner: MakeRunner, logits_after: Logits) -> None:
    runner = make_runner()
    driver = RunnerDriver(runner)
    a, b, c = Job("a", [1, 2, 3]), Job("b", [4, 5, 6]), Job("c", [4, 5, 6, 9], prompt_logprobs=1)
    h = 7
    for token in b.tokens:
        h = (h * 31 + token + 1) % 65_521
    runner._model.poison.add(h)  # type: ignore[attr-defined]
    output = driver.advance({a: 3, b: 3, c: 4})
    assert set(output.errors) == {"b", "c"} and "not finite" in output.errors["b"]
    assert dict(zip(output.request_ids, output.sampled_token_ids, strict=True))["b"] == []
    assert dict(zip(output.request_ids, output.sampled_token_ids, strict=True))["c"] == []
    assert a.tokens == plain_greedy(logits_after, [1, 2, 3], 1)


@pytest.mark.parametrize("phase", ["forward", "sample"])
@pytest.mark.parametrize("repeat", ["once", "always"])
def test_fault_hook(make_runner: MakeRunner, phase: str, repeat: str) -> None:
    driver = RunnerDriver(make_runner())
    good, bad = Job("good", [1, 2]), Job("bad", [3, 4])
    bad.fault = {"phase": phase, "repeat": repeat}
    step = driver.make_step({good: 2, bad: 2})
    with pytest.raises(InjectedFaultError):
        driver.run(step)
    with pytest.raises(RuntimeError, match="no forward"):
        driver.runner.sample_tokens()
    if repeat == "once":
        assert all(driver.run(step).sampled_token_ids)
    else:
        with pytest.raises(InjectedFaultError):
            driver.run(step)
        driver.finish(bad)
        assert len(driver.run(driver.make_step({good: 1})).request_ids) == 1


def test_logits_fault_ends_one_row_from_its_position_on(make_runner: MakeRunner, logits_after: Logits) -> None:
    driver = RunnerDriver(make_runner())
    good, bad = Job("good", [1, 2]), Job("bad", [1, 2])
    bad.fault = {"phase": "logits", "repeat": "once", "at": 3}
    assert not driver.advance({good: 2, bad: 2}).errors
    assert not driver.advance({good: 1, bad: 1}).errors
    assert set(driver.advance({good: 1, bad: 1}).errors) == {"bad"}
    assert not driver.advance({good: 1}).errors
    assert good.tokens == plain_greedy(logits_after, [1, 2], 4)


def test_grammar_masks_reach_their_rows(make_runner: MakeRunner) -> None:
    driver = RunnerDriver(make_runner())
    a, b = Job("a", [1, 2]), Job("b", [1, 2])
    mask = np.zeros(4, dtype=np.int32)
    mask[1] = 1 << 3
    step = msgspec.structs.replace(driver.make_step({a: 2, b: 2}), grammar=["b", "gone"])
    output = driver.run_step(step, GrammarOutput(request_ids=["b", "gone"], bitmask=mask.tobytes() * 2, num_words=4))
    assert output.sampled_token_ids[1] == [35] and output.sampled_token_ids[0] != [35]


def test_a_step_without_tokens_still_serves_the_connector(make_runner: MakeRunner) -> None:
    class Connector(NullWorkerConnector):
        def after_forward(self) -> ConnectorOutput:
            return ConnectorOutput(finished_sending=("x",))

    seen: list[BatchDescriptor] = []

    class Sync(NullBatchSync):
        def sync_batch(self, descriptor: BatchDescriptor) -> BatchDescriptor:
            seen.append(descriptor)
            return descriptor

    hooks = RunnerHooks(connector=Connector(), batch_sync=Sync())
    driver = RunnerDriver(make_runner(hooks=hooks))
    job = Job("a", [1, 2, 3])
    output = driver.advance({job: 3})
    assert output.connector is not None and seen == [BatchDescriptor(3, 1, 3)]
    driver.finish(job)
    empty = driver.runner.execute_model(driver.make_step({}))
    assert isinstance(empty, ModelRunnerOutput) and empty.connector is not None
    assert len(driver.runner.states) == 0


def test_times_come_from_the_clock(make_runner: MakeRunner) -> None:
    class Ticking(ManualClock):
        def monotonic(self) -> float:
            self.advance(1.0)
            return super().monotonic()

    output = RunnerDriver(make_runner(clock=Ticking())).advance({Job("a", [1]): 1})
    assert output.stats is not None
    assert (output.stats.prepare_s, output.stats.forward_s, output.stats.sample_s) == (1.0, 1.0, 1.0)
    assert output.stats.graph_mode == "EAGER" and output.stats.graph_reason


def test_blocks_are_zeroed_then_copied(make_runner: MakeRunner) -> None:
    runner = make_runner()
    key = runner._memory.caches[0].key
    key[3], key[4], key[5] = 3.0, 4.0, 5.0
    step = RunnerDriver(runner).make_step({})
    runner.execute_model(msgspec.structs.replace(step, kv=KVActions(zero=[4], copy=[(3, 5), (4, 3)])))
    assert key[3].eq(0).all() and key[4].eq(0).all() and key[5].eq(3).all()
