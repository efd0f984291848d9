"""Two ranks over gloo: the same tokens as one, faults that travel, deaths with their cause."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.base.errors import ConfigError, EngineDeadError, ModelFileError, RequestFailedError
from headrace.base.progress import ProgressWord
from headrace.config.sections import CacheSection, EngineConfig, ParallelSection, SchedulerSection
from headrace.control.kv_cache.planning import plan_kv_cache
from headrace.device.platform.hardware import detect_hardware
from headrace.executor.multiproc import MultiprocExecutor, make_executor
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AddLora
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput
from tests.device.families import make_hf_model, save_hf_model
from tests.device.models import BLOCK_SIZE, make_config
from tests.device.models import Driver as ModelDriver
from tests.runner.driver import Driver, Job

PROMPT = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(4)).tolist()
pytestmark = pytest.mark.slow


def two_ranks(path: Path) -> EngineConfig:
    return replace(
        make_config(path),
        scheduler=SchedulerSection(max_num_seqs=4, max_num_batched_tokens=64),
        parallel=ParallelSection(tensor_parallel_size=2, num_threads=2),
        cache=CacheSection(block_size=BLOCK_SIZE, kv_cache_dtype="float32", kv_cache_memory=1 << 20),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_model(make_hf_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def executor(folder: Path) -> Iterator[MultiprocExecutor]:
    made = make_executor(two_ranks(folder), ProgressWord())
    yield made
    made.shutdown()


def start(executor: MultiprocExecutor) -> Driver:
    ready = executor.start()
    assert ready.available_bytes == 1 << 19 and ready.layer_specs[0].num_kv_heads == 1
    plan = plan_kv_cache(ready.layer_specs, ready.available_bytes, 128, BLOCK_SIZE)
    graphs = executor.initialize_kv_cache(plan)
    assert graphs == GraphSummary(mode="EAGER", reason="the reference operators are called one by one")

    def run(step: SchedulerOutput) -> ModelRunnerOutput:
        output = executor.execute_model(step).result(60)
        assert output is not None
        return output

    return Driver(run, num_blocks=plan.num_blocks)


def test_two_ranks_give_the_tokens_of_one_and_survive_faults(executor: MultiprocExecutor, folder: Path) -> None:
    driver = start(executor)
    job, bad = Job("a", PROMPT), Job("bad", [4, 5, 6])
    bad.fault = {"phase": "forward", "repeat": "once"}
    step = driver.make_step({bad: 3})
    with pytest.raises(RuntimeError, match="injected fault"):
        driver.run(step)
    assert driver.run(step).sampled_token_ids[0]
    while len(job.tokens) < len(PROMPT) + 8:
        driver.advance({job: min(8, len(job.tokens) - job.num_computed)})
    model, tokens = ModelDriver.load(folder), list(PROMPT)
    for _ in range(8):
        tokens.append(int(model.run(tokens)[-1].argmax()))
    assert job.tokens == tokens
    with pytest.raises(RequestFailedError, match="AddLora"):
        executor.control(AddLora(name="x", path="y"))
    executor.check_health()


@pytest.mark.skipif(not detect_hardware().native_ops, reason="the native kernels are not built")
def test_sums_over_ranks_refuse_a_captured_plan(folder: Path) -> None:
    config = two_ranks(folder)
    executor = make_executor(replace(config, device=replace(config.device, ops="native")), ProgressWord())
    try:
        ready = executor.start()
        plan = plan_kv_cache(ready.layer_specs, ready.available_bytes, 128, BLOCK_SIZE)
        graphs = executor.initialize_kv_cache(plan)
    finally:
        executor.shutdown()
    assert (graphs.mode, graphs.sizes) == ("EAGER", [])
    assert "c10d::allreduce_" in graphs.reason


def test_a_killed_worker_ends_the_executor_with_its_cause(executor: MultiprocExecutor) -> None:
    driver = start(executor)
    victim = executor._ranks[1].process.pid
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="worker 1 was ended by SIGKILL"):
        driver.run(driver.make_step({Job("a", PROMPT): 8}))
    with pytest.raises(EngineDeadError):
        executor.check_health()
    pids = [member.process.pid for member in executor._ranks]
    executor.shutdown()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_start_up_errors_keep_their_kind(folder: Path, tmp_path: Path) -> None:
    executor = make_executor(replace(two_ranks(folder), model_path=str(tmp_path)), ProgressWord())
    with pytest.raises(ModelFileError):
        executor.start()
    executor.shutdown()
    with pytest.raises(ConfigError, match="pipeline"):
        make_executor(replace(two_ranks(folder), parallel=ParallelSection(pipeline_parallel_size=2)), ProgressWord())
