"""One rank: builds platform, operators, model and runner, and carries out what the executor asks of it.

Owns everything that lives on the device. It has no thread of its own: an executor calls it, always from the same
thread, inside `worker_thread`. Sleeping gives memory back by dropping the runner (KV blocks, rows, buffers) and, at
level 2, the model too; waking builds them again from the same plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError, EngineDeadError, RequestFailedError
from headrace.base.logging import get_logger
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.config.units import format_size
from headrace.device.distributed.groups import ParallelGroups
from headrace.device.loading.loader import LoadedModel, load_model
from headrace.device.ops.registry import make_ops
from headrace.device.platform.cpu import CpuPlatform
from headrace.device.platform.hardware import detect_hardware
from headrace.device.runner.graphs import CapturedGraphs, EagerRunner, GraphRunner, summarize
from headrace.device.runner.kv_memory import KVMemory
from headrace.device.runner.model_runner import ModelRunner, RunnerLimits
from headrace.executor.base import ExecutorReady
from headrace.executor.profiling import Profiler
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl, Profile, Reload, Sleep, Wake
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

logger = get_logger(__name__)


def worker_thread() -> AbstractContextManager[None]:
    """What the thread of a worker is in for as long as it calls it: nobody needs gradients.

    Once for all calls, since entering the mode takes 50 us at a step whose weights have emptied the caches.
    """
    return torch.inference_mode()


class Worker:
    """See the module.

    Args:
        config: resolved configuration.
        progress: moved by every layer and once per loaded tensor.
        clock: for times of start-up and of steps.
        parallel: the groups of this rank; alone by default.
    """

    def __init__(
        self, config: EngineConfig, progress: ProgressWord, clock: Clock, parallel: ParallelGroups | None = None
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._progress = progress
        self._clock = clock
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._plan: KVCacheConfig | None = None
        self._profiler = Profiler(parallel.tp.rank if parallel is not None else 0)
        self._verbs: dict[type, Callable[[Any], Any]] = {
            Profile: self._profiler.apply,
            Sleep: self._sleep,
            Wake: self._wake,
            Reload: self._reload,
        }

    def load(self) -> ExecutorReady:
        """Build everything but the KV cache.

        Raises:
            ModelFileError, ConfigError: with the remedy.
        """
        began = self._clock.monotonic()
        platform = CpuPlatform.from_config(self._config)
        platform.apply_threads()
        self._ops = make_ops(self._config)
        built = self._clock.monotonic()
        loaded = self._loaded = self._load_model()
        cache, choice = self._config.cache, loaded.attention
        logger.info("attention: %s (%s)", choice.backend.name, choice.reason)
        return ExecutorReady(
            layer_specs=[
                choice.backend.make_spec(facts, cache.block_size, cache.kv_cache_dtype)
                for facts in loaded.model.layer_facts()
            ],
            available_bytes=self._available_bytes(),
            vocab_size=self._config.architecture.vocab_size,
            attention=f"{choice.backend.name}: {choice.reason}",
            refused=choice.refused,
            phases_ms={
                "device": (built - began) * 1e3,
                "weights": (self._clock.monotonic() - built) * 1e3,
            },
        )

    def initialize_kv_cache(self, plan: KVCacheConfig) -> GraphSummary:
        """Allocate blocks, rows and buffers, and capture what steps will replay."""
        loaded, config = self._loaded, self._config
        assert loaded is not None, "load comes first"
        self._plan = plan
        runner = ModelRunner(
            loaded.model,
            self._ops,
            self._make_graphs(loaded),
            plan,
            KVMemory(plan, loaded.attention.backend),
            RunnerLimits(
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                vocab_size=config.architecture.vocab_size,
            ),
            self._clock,
            self._progress,
        )
        began = self._clock.monotonic()
        graphs = summarize(runner.capture_graphs())
        logger.info("graphs: %s (%s), %.0f ms", graphs.mode, graphs.reason, (self._clock.monotonic() - began) * 1e3)
        self._runner = runner
        return graphs

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step and sample it; ``None`` when `sample` must follow, with the mask of its grammar rows."""
        runner = self._awake()
        with self._profiler.slice("forward"):
            output = runner.execute_model(step)
        assert output is None or isinstance(output, ModelRunnerOutput), "a single stage hands nothing on"
        if output is None and not step.grammar:
            with self._profiler.slice("sample"):
                output = runner.sample_tokens(None)
        return output

    def sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the last forward, which waited for this."""
        with self._profiler.slice("sample"):
            return self._awake().sample_tokens(grammar)

    def control(self, request: AnyControl) -> Any:
        """Apply a verb.

        Raises:
            RequestFailedError: a verb that workers do not know.
        """
        verb = self._verbs.get(type(request))
        if verb is None:
            raise RequestFailedError(f"workers cannot serve '{type(request).__name__}'")
        return verb(request)

    def _awake(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker is asleep or has no KV cache yet")
        return self._runner

    def _load_model(self) -> LoadedModel:
        bar = _LoadingBar(self._progress)
        try:
            return load_model(self._config, self._ops, self._parallel, bar.update)
        finally:
            bar.close()

    def _available_bytes(self) -> int:
        """What KV blocks may take: the size asked for, or a share of what is free now that the weights are loaded."""
        cache = self._config.cache
        free = detect_hardware().available_memory_bytes
        if not cache.kv_cache_memory:
            return int(free * cache.kv_cache_share)
        if cache.num_kv_blocks is None and cache.kv_cache_memory > free:
            raise ConfigError(
                f"--kv-cache-memory {format_size(cache.kv_cache_memory)} is more than the {format_size(free)} "
                "that are free; give less"
            )
        return cache.kv_cache_memory

    def _make_graphs(self, loaded: LoadedModel) -> GraphRunner:
        """The captured plan where the operators can record one and nobody asked for eager calls."""
        if self._ops.name != "native":
            why = f"the {self._ops.name} operators are called one by one"
            return EagerRunner(loaded.model, self._ops, CapturedGraphs(why_none=why))
        if self._config.device.enforce_eager:
            return EagerRunner(loaded.model, self._ops, CapturedGraphs(why_none="--enforce-eager"))
        from headrace.device.ops.cpu.ops import NativeOps
        from headrace.device.ops.cpu.plan_runner import PlanRunner

        assert isinstance(self._ops, NativeOps)
        return PlanRunner(loaded.model, self._ops)

    def _sleep(self, request: Sleep) -> None:
        self._runner = None
        if request.level >= 2:
            self._loaded = None

    def _wake(self, request: Wake) -> None:
        wanted = set(request.tags) or {"weights", "kv_cache"}
        if "weights" in wanted and self._loaded is None:
            self._loaded = self._load_model()
        if "kv_cache" in wanted and self._runner is None:
            assert self._plan is not None
            if self._loaded is None:
                raise RequestFailedError("KV blocks need the weights: wake 'weights' first")
            self.initialize_kv_cache(self._plan)

    def _reload(self, request: Reload) -> None:
        """Weights of the same architecture; the old ones stay in force when the new ones cannot be used.

        Raises:
            EngineDeadError: there was not even room for the KV blocks that were there before.
        """
        assert self._plan is not None
        before, old = self._config, self._loaded
        if request.path is not None:
            self._config = replace(before, model_path=request.path)
        try:
            self._loaded = self._load_model()
            self._runner = None
            self.initialize_kv_cache(self._plan)
        except Exception:
            self._config, self._loaded = before, old
            if self._runner is None:
                self._restore(self._plan)
            raise

    def _restore(self, plan: KVCacheConfig) -> None:
        """Serve with the weights that are there, as before a reload that failed."""
        try:
            self.initialize_kv_cache(plan)
        except Exception as error:
            remedy = "restart the server, with less --kv-cache-memory or more memory"
            reason = f"KV blocks could not be made again after a reload: {type(error).__name__}: {error}; {remedy}"
            raise EngineDeadError(reason) from error


class _LoadingBar:
    """Shows a terminal's user how far the weights are, and moves the progress word."""

    def __init__(self, progress: ProgressWord) -> None:
        self._progress = progress
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """Called with the bytes loaded and the bytes in all."""
        self._progress.advance()
        if self._bar is None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
