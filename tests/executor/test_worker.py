"""The worker with real models behind the one-thread executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.errors import ConfigError, EngineDeadError, ModelFileError, RequestFailedError
from headrace.base.progress import ProgressWord
from headrace.config.sections import CacheSection, EngineConfig, ParallelSection, SchedulerSection
from headrace.control.kv_cache.planning import plan_kv_cache
from headrace.device.platform.hardware import detect_hardware
from headrace.device.runner.kv_memory import KVMemory
from headrace.executor import worker
from headrace.executor.base import ExecutorReady
from headrace.executor.uniproc import UniprocExecutor, make_executor
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AddLora, Reload, Sleep, Wake
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput
from tests.device.families import make_hf_model, save_hf_model
from tests.device.models import BLOCK_SIZE, make_config
from tests.device.models import Driver as ModelDriver
from tests.runner.driver import Driver, Job

PROMPT = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(4)).tolist()
SCHEDULER = SchedulerSection(max_num_seqs=4, max_num_batched_tokens=64)
PARALLEL = ParallelSection(num_threads=1)
NUM_BLOCKS = 100


class Engine:
    """A started executor and a driver on it."""

    def __init__(self, config: EngineConfig) -> None:
        self.progress = ProgressWord()
        self.executor: UniprocExecutor = make_executor(config, self.progress)
        self.ready: ExecutorReady = self.executor.start()
        plan = plan_kv_cache(
            self.ready.layer_specs,
            self.ready.available_bytes,
            config.max_model_len,
            config.cache.block_size,
            config.cache.num_kv_blocks,
        )
        self.graphs = self.executor.initialize_kv_cache(plan)
        self.driver = Driver(self.run, num_blocks=plan.num_blocks, block_size=plan.block_size)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = self.executor.execute_model(step).result(60)
        assert output is not None
        return output

    def greedy(self, name: str, count: int, chunk: int = 8) -> list[int]:
        """The prompt in chunks, then ``count`` tokens."""
        job = Job(name, PROMPT)
        while len(job.tokens) < len(PROMPT) + count:
            self.driver.advance({job: min(chunk, len(job.tokens) - job.num_computed)})
        self.driver.finish(job)
        return job.tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_model(make_hf_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """Greedy tokens by whole forwards."""
    driver, tokens = ModelDriver.load(folder), list(PROMPT)
    for _ in range(10):
        tokens.append(int(driver.run(tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


def tiny_config(folder: Path, **cache: Any) -> EngineConfig:
    settings = {"block_size": BLOCK_SIZE, "kv_cache_dtype": "float32", "kv_cache_memory": 1 << 20} | cache
    return replace(make_config(folder), scheduler=SCHEDULER, parallel=PARALLEL, cache=CacheSection(**settings))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    made = Engine(tiny_config(folder))
    yield made
    made.executor.shutdown()


def test_ready_says_what_was_built(engine: Engine) -> None:
    ready = engine.ready
    assert ready.vocab_size == 96 and len(ready.layer_specs) == 3 and ready.available_bytes == 1 << 20
    assert ready.attention.startswith("reference:") and set(ready.phases_ms) == {"device", "weights"}


def test_what_capture_gave_is_told(engine: Engine) -> None:
    assert engine.graphs == GraphSummary(mode="EAGER", reason="the reference operators are called one by one")


@pytest.mark.skipif(not detect_hardware().native_ops, reason="the native kernels are not built")
@pytest.mark.parametrize("eager", [False, True])
def test_native_forwards_are_captured_unless_nobody_wants_it(folder: Path, eager: bool) -> None:
    config = tiny_config(folder)
    engine = Engine(replace(config, device=replace(config.device, ops="native", enforce_eager=eager)))
    try:
        if eager:
            assert engine.graphs == GraphSummary(mode="EAGER", reason="--enforce-eager")
        else:
            reason = "the whole forward was captured"
            assert engine.graphs == GraphSummary(mode="FULL", reason=reason, sizes=[(64, 4)])
        engine.greedy("a", 3)
    finally:
        engine.executor.shutdown()


def test_chunks_and_decodes_equal_whole_forwards(engine: Engine, expected: list[int]) -> None:
    before = engine.progress.read()
    assert engine.greedy("a", 10) == expected
    assert engine.greedy("b", 10, chunk=100) == expected
    assert engine.progress.read() > before


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(engine: Engine, expected: list[int], level: int) -> None:
    """B103."""
    engine.greedy("a", 2)
    engine.executor.control(Sleep(level=level))
    with pytest.raises(RuntimeError, match="asleep"):
        engine.greedy("b", 1)
    if level == 2:
        with pytest.raises(RequestFailedError, match="weights"):
            engine.executor.control(Wake(tags=("kv_cache",)))
        engine.executor.control(Wake(tags=("weights",)))
    engine.executor.control(Wake())
    assert engine.greedy("c", 10) == expected


def test_reload_replaces_weights_or_keeps_the_old_ones(engine: Engine, expected: list[int], tmp_path: Path) -> None:
    torch.manual_seed(99)
    other = save_hf_model(make_hf_model("llama-tied"), tmp_path)
    with pytest.raises(ModelFileError):
        engine.executor.control(Reload(path=str(other)))
    assert engine.greedy("a", 10) == expected
    engine.executor.control(Reload())
    assert engine.greedy("b", 10) == expected


class _NoRoom:
    """Stands in for the memory of KV blocks; the first so many times there is none."""

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals

    def __call__(self, *args: Any) -> KVMemory:
        if self.num_refusals:
            self.num_refusals -= 1
            raise MemoryError("no room")
        return KVMemory(*args)


def test_a_reload_without_room_for_blocks_leaves_the_old_weights_in_force(
    engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "KVMemory", _NoRoom(1))
    with pytest.raises(MemoryError):
        engine.executor.control(Reload())
    assert engine.greedy("a", 10) == expected
    engine.executor.control(Reload())
    assert engine.greedy("b", 10) == expected


def test_a_reload_without_any_way_back_is_the_end_with_its_cause(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "KVMemory", _NoRoom(2))
    with pytest.raises(EngineDeadError, match="MemoryError: no room; restart"):
        engine.executor.control(Reload())


def test_waking_without_room_for_blocks_can_be_tried_again(
    engine: Engine, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.executor.control(Sleep())
    monkeypatch.setattr(worker, "KVMemory", _NoRoom(1))
    with pytest.raises(MemoryError):
        engine.executor.control(Wake())
    engine.executor.control(Wake())
    assert engine.greedy("a", 10) == expected


def test_unknown_verbs_are_refused_by_name(engine: Engine, expected: list[int]) -> None:
    with pytest.raises(RequestFailedError, match="AddLora"):
        engine.executor.control(AddLora(name="x", path="y"))
    assert engine.greedy("a", 10) == expected


def test_memory_for_blocks(folder: Path) -> None:
    share = Engine(tiny_config(folder, kv_cache_memory=0, kv_cache_share=1e-4, num_kv_blocks=NUM_BLOCKS))
    assert 0 < share.ready.available_bytes < 1 << 30
    share.executor.shutdown()
    executor = make_executor(tiny_config(folder, kv_cache_memory=1 << 50), ProgressWord())
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        executor.start()
    executor.shutdown()


@pytest.mark.slow
def test_goldens_in_one_batch(smollm2_gguf: Path, goldens: list[dict[str, Any]]) -> None:
    """Prompts of different lengths together, in chunks: tokens and log-probabilities of prompt and output."""
    cache = CacheSection(block_size=16, kv_cache_dtype="float32", num_kv_blocks=200, kv_cache_memory=1 << 28)
    engine = Engine(
        replace(make_config(smollm2_gguf, max_model_len=1024), scheduler=SCHEDULER, parallel=PARALLEL, cache=cache)
    )
    chosen = [p for p in goldens if len(p["prompt_ids"]) < 150 and p.get("prompt_logprobs")][:3]
    jobs = [Job(p["id"], p["prompt_ids"], logprobs=0, prompt_logprobs=0) for p in chosen]
    prompts: dict[str, list[float]] = {job.request_id: [] for job in jobs}
    outputs: dict[str, list[float]] = {job.request_id: [] for job in jobs}
    while any(len(job.tokens) < job.num_prompt + 6 for job in jobs):
        out = engine.driver.advance({job: min(20, len(job.tokens) - job.num_computed) for job in jobs})
        for name, part in out.prompt_logprobs.items():
            prompts[name] += [entry.logprobs[0] for entry in part.entries]
        for name, entries in out.logprobs.items():
            outputs[name].append(entries[0].logprobs[0])
    engine.executor.shutdown()
    for job, golden in zip(jobs, chosen, strict=True):
        assert prompts[job.request_id] == pytest.approx(golden["prompt_logprobs"][1:], abs=1e-3)
        sure = min(6, *golden["near_ties"]) if golden["near_ties"] else 6
        assert job.tokens[job.num_prompt :][:sure] == golden["output_ids"][:sure]
        assert outputs[job.request_id][:sure] == pytest.approx(golden["logprobs"][:sure], abs=1e-3)
