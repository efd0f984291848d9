"""`EngineCore`: requests in, tokens out, one step at a time.

Owns the scheduler (and with it requests and KV blocks), the pipeline of steps in flight and the lifecycle state. Knows
nothing of sockets, threads or clients beyond their number; `CoreLoop` drives it. All methods but `abort_soon` are
called from one thread.

Order of effects in `step`: schedule, start the forward, make the grammar bitmask while it runs, sample, apply the
aborts that came meanwhile, commit, hand out. A fault in a forward or a sampling ends the request that causes it
(`core.recovery`); a fault in scheduling or committing, or the death of the executor, leaves `step` as an exception and
is the end of the core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import to_builtins

from headrace.base.clock import Clock
from headrace.base.errors import EngineDeadError, HeadraceError, InvalidRequestError, NotAcceptingError
from headrace.base.logging import get_logger
from headrace.config.sections import EngineConfig
from headrace.control.grammar.protocol import Grammar
from headrace.control.kv_cache.events import EventSink
from headrace.control.kv_cache.planning import describe, max_concurrency, num_cache_tokens, plan_kv_cache
from headrace.control.scheduler.recorder import NullStepRecorder, StepRecorder
from headrace.control.scheduler.scheduler import Scheduler
from headrace.core.lifecycle import CoreState, Verb, admits, next_state, runs_steps
from headrace.core.outbox import Outbox
from headrace.core.pipeline import Flight, Pipeline, StepFailedError
from headrace.core.recovery import StepRecovery
from headrace.executor.base import Executor
from headrace.kv_connector.protocol import SchedulerConnector
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import (
    ControlReply,
    CoreReady,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
)
from headrace.messages.requests import (
    Abort,
    AddLora,
    AnyControl,
    Drain,
    EngineCoreRequest,
    Profile,
    Query,
    Reload,
    ResetPrefixCache,
    Sleep,
    Stop,
    Wake,
)
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

logger = get_logger(__name__)

STATS_INTERVAL_S = 0.1
WAKE_TAGS = frozenset({"weights", "kv_cache"})


class CoreGrammar(Grammar, Protocol):
    """Grammars as scheduler and core need them."""

    def make_bitmask(self, step: SchedulerOutput) -> GrammarOutput:
        """Which tokens each of ``step.grammar`` may sample, given all tokens that are certain.

        Some of them may have ended since; they need no mask.
        """
        ...


class EngineCore:
    """See the module.

    Args:
        config: resolved.
        executor: not started yet; the core ends it in `shutdown`.
        clock: all times that leave the core come from it.
        connector: scheduler side of the KV connector; none by default.
        grammar: compiles grammars and makes bitmasks; by default requests that need one end with an error.
        recorder: takes note of decisions; nobody by default.
        events: told what becomes findable in the KV cache; nobody by default.
        views: more topics of `Query`, each given the query's argument.
        make_scheduler: `Scheduler`, or one that is watched.
        after_step: called at the end of each step.
        closers: called when the core ends.
        at_rest: called once, when the core has had nothing to do for a while; they return at once.

    Raises:
        ConfigError, ModelFileError: it cannot start, with the remedy.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        *,
        connector: SchedulerConnector | None = None,
        grammar: CoreGrammar | None = None,
        recorder: StepRecorder | None = None,
        events: EventSink | None = None,
        views: Mapping[str, Callable[[str | None], Any]] | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        after_step: Sequence[Callable[[], None]] = (),
        closers: Sequence[Callable[[], None]] = (),
        at_rest: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.config = config
        self.state = CoreState.READY
        self.stalled = False
        self._sleep_level = 0
        self._executor = executor
        self._clock = clock
        self._recorder = recorder if recorder is not None else NullStepRecorder()
        self._views = views or {}
        self._after_step = after_step
        self._closers = closers
        self._at_rest = at_rest
        plan, self.ready, self._refused_attention = _start(executor, config, clock)
        depth = config.scheduler.pipeline_depth
        self.scheduler = make_scheduler(
            config.scheduler,
            plan,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            connector=connector,
            grammar=grammar,
            recorder=self._recorder,
            events=events,
        )
        self._pipeline = Pipeline(executor, depth, grammar.make_bitmask if grammar is not None else _make_no_bitmask)
        self._recovery = StepRecovery(self.scheduler, self._pipeline, clock, self._commit, self._tell)
        self._outbox = Outbox()
        self._aborts: deque[str] = deque()
        self._draining_calls: list[tuple[int, int]] = []
        self._stats_due = 0.0
        self._has_news = False
        self._handlers: dict[type, Callable[[Any], Any]] = {
            Abort: lambda verb: self.abort_soon(verb.request_ids),
            Drain: lambda verb: self._move(Verb.DRAIN),
            Sleep: self._sleep,
            Wake: self._wake,
            Reload: self._reload,
            ResetPrefixCache: self._reset_prefix_cache,
            AddLora: self._ask_workers,
            Profile: self._ask_workers,
            Stop: self._stop,
            Query: self._query,
        }

    # What the driver asks

    @property
    def stopped(self) -> bool:
        """Whether the core has been told to end."""
        return self.state is CoreState.STOPPED

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something."""
        scheduler = self.scheduler
        waiting = runs_steps(self.state) and (scheduler.has_unfinished or scheduler.has_pending_transfers)
        return bool(waiting or len(self._pipeline) or self._aborts or self._outbox or self._draining_calls)

    def check_health(self) -> None:
        """Raise `EngineDeadError` when a worker is gone."""
        self._executor.check_health()

    # What comes in

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; one that cannot be taken ends with an error of its own."""
        if not admits(self.state):
            self._outbox.refuse(request.client_index, request.request_id, f"the engine is {self.state.value}")
            return
        try:
            self.scheduler.add_request(request, self._clock.monotonic())
        except HeadraceError as error:
            self._outbox.refuse(request.client_index, request.request_id, str(error))
        except Exception as error:
            logger.exception("a request could not be prepared")
            self._outbox.refuse(request.client_index, request.request_id, f"{type(error).__name__}: {error}")

    def abort_soon(self, request_ids: list[str]) -> None:
        """End requests before the next commit; from any thread. Unknown and finished ids are ignored."""
        self._aborts.extend(request_ids)

    def control(self, request: AnyControl, client_index: int = 0) -> None:
        """Apply a verb and answer its caller; a verb that fails is answered with its error and nobody else hears."""
        call_id = request.call_id
        try:
            value = self.perform(request)
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("control verb %s failed", type(request).__name__)
            if call_id is not None:
                self._outbox.reply(client_index, ControlReply(call_id=call_id, error=str(error) or repr(error)))
            return
        if call_id is None:
            return
        if isinstance(request, Drain):
            self._draining_calls.append((client_index, call_id))
        else:
            self._outbox.reply(client_index, ControlReply(call_id=call_id, value=value))

    def perform(self, request: AnyControl) -> Any:
        """Apply a verb and return its value; raises what it failed with."""
        return self._handlers[type(request)](request)

    # The loop

    def step(self) -> dict[int, EngineCoreOutputs]:
        """One iteration; returns what each client is to hear."""
        pipeline = self._pipeline
        step = self._schedule()
        if step is not None:
            # The forward, the grammar bitmask while it runs, the sampling.
            pipeline.launch(step)
            self._recorder.on_launched(step.step_id, self._clock.monotonic())
        # The pipeline is filled first; then its oldest step is waited for and committed.
        flight = None if step is not None and pipeline.has_room else pipeline.take_oldest()
        if flight is not None:
            self._finish(flight)
        self._apply_aborts()
        # A step that only asks the connector for news is not worth spinning for.
        moved = (step, flight.step if flight is not None else None)
        self.stalled = not any(one is not None and one.num_scheduled_tokens for one in moved)
        return self._take_outbox()

    def rest(self) -> None:
        """There has been nothing to do for a while: begin what would be in the way of requests later."""
        acts, self._at_rest = self._at_rest, ()
        for act in acts:
            act()

    def shutdown(self) -> None:
        """End the executor. Idempotent."""
        self.state = next_state(self.state, Verb.STOP)
        self._executor.shutdown()
        closers, self._closers = self._closers, ()
        for close in closers:
            close()

    def _schedule(self) -> SchedulerOutput | None:
        """The next step, if there is room for one and anything to run or to ask the connector."""
        if not (self._pipeline.has_room and runs_steps(self.state)):
            return None
        step = self.scheduler.schedule(self._clock.monotonic())
        return step if step.num_scheduled_tokens or step.connector is not None else None

    def _finish(self, flight: Flight) -> None:
        """Wait for a step and commit it; one that failed is run again in parts."""
        try:
            output = self._pipeline.wait(flight)
        except StepFailedError as error:
            logger.debug("step %d failed", flight.step.step_id, exc_info=True)
            self._recovery.run(flight.step, error)
        else:
            self._apply_aborts()
            self._commit(flight.step, output)

    def _commit(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        self._outbox.add(self.scheduler.update_from_output(step, output, self._clock.monotonic()))
        self._pipeline.committed()
        self._recorder.on_updated(step.step_id, output.stats, self.scheduler.kv.usage, self._clock.monotonic())
        self._has_news = True

    def _tell(self, outputs: dict[int, list[EngineCoreOutput]]) -> None:
        self._outbox.add({client: EngineCoreOutputs(outputs=ended) for client, ended in outputs.items()})
        self._has_news = True

    def _apply_aborts(self) -> None:
        request_ids = []
        while self._aborts:
            request_ids.append(self._aborts.popleft())
        if request_ids:
            self._tell(self.scheduler.finish_requests(request_ids, FinishReason.ABORT))

    def _take_outbox(self) -> dict[int, EngineCoreOutputs]:
        """What there is to tell, with statistics now and then, and always when work ends."""
        self._outbox.add(self.scheduler.take_outputs())
        idle = not self.scheduler.has_unfinished
        if idle:
            for client_index, call_id in self._draining_calls:
                self._outbox.reply(client_index, ControlReply(call_id=call_id))
            self._draining_calls.clear()
        now = self._clock.monotonic()
        if self._has_news and (idle or now >= self._stats_due):
            self._has_news = False
            self._stats_due = now + STATS_INTERVAL_S
            self._outbox.set_stats(0, self._make_stats())
        outputs = self._outbox.take()
        self._recorder.on_output(self._clock.monotonic())
        for act in self._after_step:
            act()
        return outputs

    def _make_stats(self) -> SchedulerStats:
        stats = self._recorder.add_totals(self.scheduler.make_stats())
        return msgspec.structs.replace(stats, sleep_level=self._sleep_level) if self._sleep_level else stats

    def _quiesce(self) -> None:
        """Commit everything in flight, so that nothing runs."""
        while (flight := self._pipeline.take_oldest()) is not None:
            self._finish(flight)

    # Verbs

    def _move(self, verb: Verb) -> None:
        self.state = next_state(self.state, verb)

    def _ask_workers(self, request: AnyControl) -> Any:
        self._quiesce()
        return self._executor.control(request)

    def _sleep(self, request: Sleep) -> None:
        state = next_state(self.state, Verb.SLEEP)
        self._forget_kv()
        self._executor.control(request)
        self.state = state
        self._sleep_level, self._has_news = request.level, True
        self.scheduler.hold_waiting(self._clock.monotonic())

    def _wake(self, request: Wake) -> str:
        state = next_state(self.state, Verb.WAKE)
        unknown = set(request.tags) - WAKE_TAGS
        if unknown:
            raise InvalidRequestError(f"tags can be {', '.join(sorted(WAKE_TAGS))}", param="tags")
        self._executor.control(request)
        # KV blocks come last: without them nothing can run.
        if not request.tags or "kv_cache" in request.tags:
            self.state = state
            self._sleep_level, self._has_news = 0, True
        return self.state.value

    def _reload(self, request: Reload) -> None:
        self._move(Verb.RELOAD)
        try:
            self._forget_kv()
            self.scheduler.hold_waiting(self._clock.monotonic())
            self._executor.control(request)
        finally:
            self._move(Verb.RELOADED)

    def _reset_prefix_cache(self, request: ResetPrefixCache) -> bool:
        self._quiesce()
        return self.scheduler.reset_prefix_cache(request.reset_running)

    def _forget_kv(self) -> None:
        """No block keeps contents: what runs is preempted and computed anew later."""
        self._quiesce()
        if not self.scheduler.reset_prefix_cache(True):
            raise NotAcceptingError("a KV transfer is still using blocks; try again when it has ended")

    def _stop(self, request: Stop) -> None:
        self._quiesce()
        self._tell(self.scheduler.finish_requests(None, FinishReason.ABORT))
        self._move(Verb.STOP)

    def _query(self, request: Query) -> Any:
        topics: dict[str, Callable[[], Any]] = {
            "state": self._describe_state,
            "stats": lambda: to_builtins(self._make_stats()),
            "config": lambda: to_builtins(self.config),
            "kv_blocks": self.scheduler.kv.get_block_states,
            "graphs": lambda: to_builtins(self.ready.graphs),
            "attention": lambda: {"chosen": self.ready.attention, "refused": self._refused_attention},
        }
        if request.topic in topics:
            return topics[request.topic]()
        if request.topic in self._views:
            return self._views[request.topic](request.argument)
        known = ", ".join([*topics, *self._views])
        raise InvalidRequestError(f"nothing is known about '{request.topic}'; topics: {known}")

    def _describe_state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {"state": self.state.value, "num_unfinished": scheduler.num_running + scheduler.num_waiting}


def _start(executor: Executor, config: EngineConfig, clock: Clock) -> tuple[KVCacheConfig, CoreReady, dict[str, str]]:
    """Load the model, plan the KV cache and have it made.

    Returns:
        The plan, what the frontend is told, and why each attention backend but the chosen one was refused.
    """
    began = clock.monotonic()
    loaded = executor.start()
    cache, max_model_len = config.cache, config.max_model_len
    plan = plan_kv_cache(
        loaded.layer_specs, loaded.available_bytes, max_model_len, cache.block_size, cache.num_kv_blocks
    )
    logger.info(describe(plan, max_model_len))
    planned = clock.monotonic()
    graphs = executor.initialize_kv_cache(plan)
    # The phases do not overlap: together they are the time from the start to here.
    other_ms = max(0.0, (planned - began) * 1e3 - sum(loaded.phases_ms.values()))
    own_phases_ms = {"workers": other_ms, "kv_cache": (clock.monotonic() - planned) * 1e3}
    ready = CoreReady(
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        kv_cache_tokens=num_cache_tokens(plan, max_model_len),
        max_concurrency=max_concurrency(plan, max_model_len),
        attention=loaded.attention,
        graphs=graphs,
        phases_ms=loaded.phases_ms | own_phases_ms,
    )
    return plan, ready, loaded.refused


def _make_no_bitmask(step: SchedulerOutput) -> None:
    """Without grammars no row needs a mask."""
    assert not step.grammar, step.grammar
