"""An executor without a model: rows, block tables and KV blocks are real, tokens come from `testing.tokens`.

It keeps the executor's promises (calls run in order, rows live from `NewRequest` to ``finished`` or ``preempted``,
tokens are written at their absolute positions) and checks the scheduler's: each slot of a KV block holds the running
hash of the tokens up to it, and a forward reads every slot that its rows may attend to. What does not fit is listed
in ``violations``; tests assert that the list stays empty.

With ``lazy`` nothing runs before somebody waits for it, the latest moment that the interface allows. Durations come
from a `StepCost` and pass on the clock: a `ManualClock` is moved, on any other one the executor sleeps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from headrace.base.clock import Clock, ManualClock, SystemClock
from headrace.base.errors import ConfigError, EngineDeadError, ModelFileError
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.executor.base import Executor, ExecutorReady
from headrace.kv_connector.null import NullWorkerConnector
from headrace.kv_connector.protocol import WorkerConnector
from headrace.messages.kv_cache import KVCacheConfig, KVCacheKind, KVCacheSpec
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl, Reload
from headrace.messages.runner_output import (
    NO_TOKEN_LEFT,
    NON_FINITE,
    ModelRunnerOutput,
    PromptLogprobs,
    StepStats,
    TokenLogprobs,
)
from headrace.messages.scheduler_output import (
    GrammarOutput,
    NewRequest,
    SchedulerOutput,
)
from headrace.testing.faults import Crash, FaultPlan, RequestFault, SimulatedFault, make_crash, parse_fault
from headrace.testing.tokens import extend_hash, fake_logprobs, pick_token

T = TypeVar("T")
BYTES_PER_TOKEN = 16
MOVES_EVERY_S = 0.25
HANGS_FOR_S = 3600.0
GARBAGE = 0xBAD0_BAD0_BAD0_BAD0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a forward takes."""

    per_step_s: float = 1e-3
    per_token_s: float = 1e-5

    def seconds(self, step: SchedulerOutput) -> float:
        """Duration of ``step``."""
        return self.per_step_s + self.per_token_s * step.total_num_scheduled_tokens


@dataclass(slots=True)
class _Row:
    """A request on the device: ``hashes[i]`` is the running hash through ``tokens[i]``.

    A row is spoilt by a failed step: what steps in flight make of it will be dropped, and it comes anew.
    """

    request: NewRequest
    block_ids: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    fault: RequestFault | None = None
    spoilt: bool = False

    def write(self, position: int, token_ids: list[int]) -> None:
        """Set the tokens from ``position`` on."""
        del self.tokens[position:], self.hashes[position:]
        running = self.hashes[-1] if self.hashes else 1
        for token_id in token_ids:
            running = extend_hash(running, token_id)
            self.tokens.append(token_id)
            self.hashes.append(running)


@dataclass(slots=True)
class _Span:
    """What one request does in one step: compute positions ``start`` to ``stop``, then perhaps sample.

    ``garbage`` is not 0 when it attended to wrong KV: all that comes of it is wrong then.
    """

    row: _Row
    start: int
    stop: int
    garbage: int = 0

    @property
    def samples(self) -> bool:
        """Whether the span holds the last token known when the row was made, or a later one."""
        return self.stop >= len(self.row.request.token_ids)

    def strikes(self, phase: str) -> bool:
        fault = self.row.fault
        return fault is not None and fault.phase == phase and fault.at < self.stop


@dataclass(slots=True)
class _Forward:
    """A forward that waits for its sampling."""

    number: int
    spans: list[_Span]
    error: Exception | None = None


class _LazyFuture(Future[T]):
    """A future that runs the executor's queue when it is waited for."""

    def __init__(self, run: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._run = run

    def result(self, timeout: float | None = None) -> T:
        self._run(self)
        value: T = super().result(timeout)
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run(self)
        return super().exception(timeout)


class SimulatedExecutor(Executor):
    """See the module.

    Args:
        config: sizes; ``cache.kv_cache_memory`` limits the blocks.
        clock: where durations pass; ``None`` takes no time at all.
        cost: durations.
        faults: what goes wrong and when.
        lazy: run steps only when their results are waited for.
        progress: advanced by each forward.
        connector: worker side of a KV connector; it is given the blocks as one array ``[block, offset]``.
        tell_wrong_kv: note a read of wrong KV as a violation; off where loads may fail, since the steps in flight
            behind a failed load read garbage rightly (and wrong tokens come of it, should anybody deliver them).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        cost: StepCost | None = None,
        faults: FaultPlan | None = None,
        lazy: bool = False,
        progress: ProgressWord | None = None,
        connector: WorkerConnector | None = None,
        tell_wrong_kv: bool = True,
    ) -> None:
        self.violations: list[str] = []
        self.controls: list[AnyControl] = []
        self.num_forwards = 0
        self.closed = False
        self._config = config
        self._clock = clock
        self._cost = cost or StepCost()
        self._faults = faults or FaultPlan()
        self._lazy = lazy
        self._progress = progress or ProgressWord()
        self._connector = connector or NullWorkerConnector()
        self._tell_wrong_kv = tell_wrong_kv
        self._rows: dict[str, _Row] = {}
        self._struck: set[str] = set()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._forwards: deque[_Forward] = deque()
        self._dead: str | None = None
        self._kv_config: KVCacheConfig | None = None
        self._kv = np.zeros((0, 0), dtype=np.uint64)

    def start(self) -> ExecutorReady:
        size = self._config.cache.block_size
        specs = [
            KVCacheSpec(
                kind=KVCacheKind(kind),
                block_size=size,
                num_kv_heads=1,
                head_dim=1,
                dtype="uint64",
                tensors=(),
                page_bytes=size * BYTES_PER_TOKEN,
                window=0 if kind == "full" else self._config.architecture.window,
            )
            for kind in self._config.architecture.layer_kinds
        ]
        memory = self._config.cache.kv_cache_memory or 1 << 20
        return ExecutorReady(specs, memory, self._config.architecture.vocab_size, attention="simulated")

    def initialize_kv_cache(self, config: KVCacheConfig) -> GraphSummary:
        self._kv_config = config
        self._kv = np.zeros((config.num_blocks, config.block_size), dtype=np.uint64)
        self._connector.register_caches([self._kv])
        return GraphSummary(mode="EAGER", reason="there is no model")

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        if self.num_forwards == self._faults.crash_at:
            raise make_crash(self._faults.crash)
        return self._submit(lambda: self._step(step), non_block)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return self._submit(lambda: self._sample(grammar), True)

    def control(self, request: AnyControl) -> Any:
        self._check_alive()
        self.controls.append(request)
        if isinstance(request, Reload) and request.path is not None:
            raise ModelFileError(f"no model in {request.path}")
        return None

    def check_health(self) -> None:
        self._check_alive()

    def shutdown(self) -> None:
        self.closed = True
        self._rows.clear()

    def kill(self, cause: str = "a simulated worker died") -> None:
        """Let the workers die now."""
        self._dead = cause

    @property
    def row_ids(self) -> set[str]:
        """Requests that have a row."""
        return set(self._rows)

    def _submit(self, call: Callable[[], Any], non_block: bool) -> Future[Any]:
        future: Future[Any] = _LazyFuture(self._run_until)
        self._calls.append((call, future))
        if not self._lazy or not non_block:
            self._run_until(future)
        return future

    def _run_until(self, future: Future[Any]) -> None:
        while self._calls and not future.done():
            call, current = self._calls.popleft()
            try:
                current.set_result(call())
            except Exception as error:  # noqa: BLE001 - the future carries it
                current.set_exception(error)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _step(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        try:
            output = self._forward(step)
        except SimulatedFault:
            if not step.grammar:
                self._forwards.pop()
            raise
        return self._sample(None) if output is None and not step.grammar else output

    def _forward(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        number = self.num_forwards
        self.num_forwards += 1
        if self._faults.die_at is not None and number >= self._faults.die_at:
            self.kill()
        self._check_alive()
        if number == self._faults.hang_at:
            time.sleep(HANGS_FOR_S)
        self._pass_time(self._cost.seconds(step) + self._faults.slow_s.get(number, 0.0))
        self._progress.advance()
        self._apply_rows(step)
        self._connector.before_forward(step.connector)
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput(
                request_ids=[],
                sampled_token_ids=[],
                connector=self._connector.after_forward(),
            )
        spans = self._make_spans(step)
        try:
            if number in self._faults.fail_forward:
                raise SimulatedFault(f"forward {number} was told to fail")
            self._strike(spans, "forward")
        except SimulatedFault as error:
            _spoil(spans.values())
            self._forwards.append(_Forward(number, [], error))
            raise
        for request_id, span in spans.items():
            self._compute(request_id, span)
        self._forwards.append(_Forward(number, list(spans.values())))
        return None

    def _sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        self._check_alive()
        forward = self._forwards.popleft()
        number, spans = forward.number, forward.spans
        if forward.error is not None:
            raise SimulatedFault(str(forward.error))
        try:
            if number in self._faults.fail_sample:
                raise SimulatedFault(f"sampling {number} was told to fail")
            self._strike({span.row.request.request_id: span for span in spans}, "sample")
        except SimulatedFault:
            _spoil(spans)
            raise
        masks = _masks_by_request(grammar)
        request_ids: list[str] = []
        sampled: list[list[int]] = []
        errors: dict[str, str] = {}
        for span in spans:
            request_id = span.row.request.request_id
            request_ids.append(request_id)
            token_ids = None if span.strikes("logits") else self._sample_row(span, masks.get(request_id))
            sampled.append(token_ids or [])
            if token_ids is None:
                errors[request_id] = NON_FINITE if span.strikes("logits") else NO_TOKEN_LEFT
                # A real row has some token here too; steps in flight behind this one compute with it.
                if span.samples:
                    span.row.write(span.stop, [0])
        return ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=sampled,
            logprobs=self._logprobs(spans, sampled),
            prompt_logprobs=self._prompt_logprobs(spans),
            errors=errors,
            connector=self._connector.after_forward(),
            stats=StepStats(forward_s=1e-3),
        )

    def _logprobs(self, spans: list[_Span], sampled: list[list[int]]) -> dict[str, list[TokenLogprobs]]:
        """Those of the sampled tokens, for requests that want them."""
        vocab_size = self._config.architecture.vocab_size
        found = {}
        for span, token_ids in zip(spans, sampled, strict=True):
            count = span.row.request.sampling.logprobs
            if count is not None and token_ids:
                found[span.row.request.request_id] = [fake_logprobs(i, count, vocab_size) for i in token_ids]
        return found

    def _prompt_logprobs(self, spans: list[_Span]) -> dict[str, PromptLogprobs]:
        """Those of the prompt's tokens behind each computed one, for requests that want them."""
        vocab_size = self._config.architecture.vocab_size
        found = {}
        for span in spans:
            request = span.row.request
            count = request.sampling.prompt_logprobs
            ids = request.token_ids[span.start + 1 : min(span.stop + 1, request.num_prompt_tokens)]
            if count is not None and ids:
                entries = [fake_logprobs(i, count, vocab_size) for i in ids]
                found[request.request_id] = PromptLogprobs(span.start + 1, entries)
        return found

    def _sample_row(self, span: _Span, mask: int | None) -> list[int] | None:
        """The sampled token, nothing before the last known one, or ``None`` where every token is forbidden."""
        row, sampling = span.row, span.row.request.sampling
        if not span.samples:
            return []
        num_outputs = span.stop - row.request.num_prompt_tokens
        stops = {*row.request.eos_token_ids, *sampling.stop_token_ids}
        vocab_size = self._config.architecture.vocab_size
        banned = stops if num_outputs < sampling.min_tokens else set()
        if mask is not None:
            banned |= {token_id for token_id in range(vocab_size) if not mask >> token_id & 1}
        if len(banned) >= vocab_size:
            return None
        running = row.hashes[span.stop - 1] if len(row.hashes) >= span.stop else 1
        token_id = pick_token(sampling.seed or 0, running ^ span.garbage, vocab_size, banned)
        row.write(span.stop, [token_id])
        return [token_id]

    def _strike(self, spans: dict[str, _Span], phase: str) -> None:
        for request_id, span in spans.items():
            if span.strikes(phase) and request_id not in self._struck:
                assert span.row.fault is not None
                if span.row.fault.repeat == "once":
                    self._struck.add(request_id)
                raise SimulatedFault(f"the {phase} of a poisoned request failed")

    def _apply_rows(self, step: SchedulerOutput) -> None:
        for request_id in [*step.finished, *step.preempted]:
            self._rows.pop(request_id, None)
        for block_id in step.kv.zero:
            self._kv[block_id] = 0
        for source, destination in step.kv.copy:
            self._kv[destination] = self._kv[source]
        for new in step.new:
            row = _Row(new, [list(ids) for ids in new.block_ids], fault=parse_fault(new.fault))
            row.write(0, new.token_ids)
            self._rows[new.request_id] = row
        for request_id, block_ids in step.cached.new_block_ids.items():
            if request_id not in self._rows:
                self._violate(f"blocks for {request_id}, which has no row")
                continue
            for table, new_ids in zip(self._rows[request_id].block_ids, block_ids, strict=True):
                table.extend(new_ids)

    def _make_spans(self, step: SchedulerOutput) -> dict[str, _Span]:
        starts = {new.request_id: new.num_computed_tokens for new in step.new}
        starts.update(zip(step.cached.request_ids, step.cached.num_computed_tokens, strict=True))
        spans = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self._rows.get(request_id)
            if row is None:
                self._violate(f"{request_id} is scheduled without a row")
                continue
            spans[request_id] = _Span(row, starts[request_id], starts[request_id] + num_tokens)
        total = sum(step.num_scheduled_tokens.values())
        if total != step.total_num_scheduled_tokens:
            self._violate(f"step {step.step_id} says {step.total_num_scheduled_tokens} tokens and holds {total}")
        return spans

    def _compute(self, request_id: str, span: _Span) -> None:
        """Read the slots before the span and write those in it, per group."""
        assert self._kv_config is not None
        row, size = span.row, self._kv_config.block_size
        if span.stop > len(row.tokens):
            self._violate(f"{request_id} computes position {span.stop - 1} and knows {len(row.tokens)} tokens", row)
            return
        hashes = np.array(row.hashes[: span.stop], dtype=np.uint64)
        for group, table in zip(self._kv_config.groups, row.block_ids, strict=True):
            if len(table) * size < span.stop:
                self._violate(f"{request_id} computes position {span.stop - 1} in {len(table)} blocks of {size}", row)
                continue
            low = first_attended(group.spec, span.start)
            positions = np.arange(low, span.stop)
            blocks = np.array(table, dtype=np.int64)[positions // size]
            past = positions < span.start
            found = self._kv[blocks[past], positions[past] % size]
            wrong = found != hashes[low : span.start]
            if wrong.any():
                span.garbage = GARBAGE
                if self._tell_wrong_kv:
                    at = low + int(np.argmax(wrong))
                    self._violate(f"{request_id} reads wrong KV at position {at} before computing {span.start}", row)
            if (blocks[~past] == 0).any():
                self._violate(f"{request_id} writes to the null block", row)
            self._kv[blocks[~past], positions[~past] % size] = hashes[span.start : span.stop] ^ np.uint64(span.garbage)

    def _violate(self, message: str, row: _Row | None = None) -> None:
        """Note a broken promise."""
        if row is None or not row.spoilt:
            self.violations.append(message)

    def _pass_time(self, seconds: float) -> None:
        if isinstance(self._clock, ManualClock):
            self._clock.advance(seconds)
        elif self._clock is not None:
            # A forward that computes moves the word all the time, however long it takes.
            end = time.monotonic() + seconds
            while (rest := end - time.monotonic()) > 0:
                time.sleep(min(rest, MOVES_EVERY_S))
                self._progress.advance()


def _masks_by_request(grammar: GrammarOutput | None) -> dict[str, int]:
    """Bit ``t`` of a request's mask says whether it may sample token ``t``."""
    if grammar is None:
        return {}
    size = 4 * grammar.num_words
    rows = [grammar.bitmask[i * size : (i + 1) * size] for i in range(len(grammar.request_ids))]
    return {key: int.from_bytes(row, "little") for key, row in zip(grammar.request_ids, rows, strict=True)}


def _spoil(spans: Iterable[_Span]) -> None:
    for span in spans:
        span.row.spoilt = True


def make_executor(
    config: EngineConfig,
    progress: ProgressWord,
    *,
    step_s: float = 0.0,
    die_at: int | None = None,
    hang_at: int | None = None,
    crash_at: int | None = None,
    crash: Crash = "fault",
    start_error: str | None = None,
    start_s: float = 0.0,
) -> Executor:
    """The factory that a core process is given by dotted path; all options are plain data.

    Args:
        step_s: seconds that each forward takes on the machine's clock.
        die_at: number of the forward at which the workers die.
        hang_at: number of the forward that never returns.
        crash_at, crash: number of the forward at which the executor itself raises, and what.
        start_error: ``config``, ``model_file`` or ``crash``: what start-up raises.
        start_s: seconds that start-up takes.
    """
    time.sleep(start_s)
    if start_error is not None:
        kinds: dict[str, type[Exception]] = {
            "config": ConfigError,
            "model_file": ModelFileError,
        }
        raise kinds.get(start_error, RuntimeError)("start-up was told to fail")
    return SimulatedExecutor(
        config,
        clock=SystemClock() if step_s else None,
        cost=StepCost(step_s, 0.0),
        faults=FaultPlan(die_at=die_at, hang_at=hang_at, crash_at=crash_at, crash=crash),
        progress=progress,
    )


def first_attended(spec: KVCacheSpec, position: int) -> int:
    """The first position that a query at ``position`` attends to."""
    if spec.kind is KVCacheKind.SLIDING_WINDOW:
        return max(0, position - spec.window + 1)
    if spec.kind is KVCacheKind.CHUNKED_LOCAL:
        return position // spec.window * spec.window
    return 0
