"""A whole engine core in virtual time, under random work and faults, from one seed.

The core, scheduler and KV cache manager are the real ones; executor, clock, connector and clients are imagined. After
each step the books are checked: every block has one owner, budgets were kept, KV was right where it was read, every
output is the next part of the one answer that the request can have. A run that raises is repeated exactly by its seed.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from headrace.base.clock import ManualClock
from headrace.base.errors import EngineDeadError
from headrace.config.sections import EngineConfig
from headrace.core.engine_core import EngineCore
from headrace.core.loop import STALLED_S
from headrace.messages.outputs import EngineCoreOutput, FinishReason
from headrace.messages.requests import AnyControl, EngineCoreRequest, ResetPrefixCache, Sleep, Wake
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.sampling_params import StructuredOutputParams
from headrace.messages.scheduler_output import SchedulerOutput
from headrace.testing.engine_config import make_architecture, make_engine_config
from headrace.testing.fake_connector import FakeConnector, FakeWorkerConnector
from headrace.testing.fake_grammar import FakeGrammar, forbidden_tokens
from headrace.testing.faults import FaultPlan
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor, StepCost
from headrace.testing.tokens import ExpectedOutput, expected_output

VOCAB = 50
MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a seed decides."""

    config: EngineConfig
    requests: list[EngineCoreRequest]
    faults: FaultPlan
    lazy: bool
    with_connector: bool
    abort_share: float
    verb_share: float
    read_share: float


@dataclass(slots=True)
class Client:
    """Everything that one request's client knows."""

    request: EngineCoreRequest
    expected: ExpectedOutput
    aborted: bool = False
    patience: int | None = None
    tokens: list[int] = field(default_factory=list)
    end: EngineCoreOutput | None = None
    unread: list[EngineCoreOutput] = field(default_factory=list)


class RecordingExecutor(SimulatedExecutor):
    """Keeps the sizes of the steps that it was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[SchedulerOutput] = []

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        self.steps.append(step)
        return super().execute_model(step, non_block)


def make_scenario(seed: int, *, depth: int | None = None, policy: str | None = None) -> Scenario:
    """Draw a scenario; ``depth`` and ``policy`` override what the seed says."""
    random = Random(seed)
    block_size = random.choice([1, 2, 4, 8])
    max_model_len = random.choice([24, 48, 96])
    windowed = random.random() < 0.3
    kinds = random.choice([("full", "sliding_window"), ("full", "chunked_local"), ("sliding_window",) * 2])
    architecture = make_architecture(
        vocab_size=VOCAB,
        eos_token_ids=(7,),
        layer_kinds=kinds if windowed else ("full", "full"),
        window=random.choice([1, 2, 3]) * block_size if windowed else 0,
    )
    num_groups = len(set(architecture.layer_kinds))
    needed = num_groups * (max_model_len // block_size + 2) + 1
    batched = random.choice([8, 16, 64, 256])
    config = make_engine_config(
        architecture,
        block_size=block_size,
        max_model_len=max_model_len,
        num_kv_blocks=int(needed * random.choice([1.0, 1.3, 2.0, 6.0])) + 1,
        max_num_seqs=random.choice([1, 3, 8]),
        max_num_batched_tokens=batched,
        max_num_scheduled_tokens=random.choice([batched, max(8, batched // 2)]),
        long_prefill_token_threshold=random.choice([0, 0, 5, 17]),
        enable_prefix_caching=random.random() < 0.8,
        scheduling_policy=policy or random.choice(["fcfs", "priority"]),
        pipeline_depth=depth or random.choice([1, 2, 3]),
        watermark=random.choice([0.0, 0.01, 0.1]),
        max_token_gap_factor=random.choice([0.0, 1.5]),
    )
    faults = _draw_faults(random)
    with_faults = not (faults.fail_forward or faults.fail_sample) and random.random() < 0.5
    return Scenario(
        config=config,
        requests=_draw_requests(random, max_model_len, with_faults=with_faults),
        faults=faults,
        lazy=random.random() < 0.6,
        with_connector=random.random() < 0.3,
        abort_share=random.choice([0.0, 0.0, 0.02, 0.2]),
        verb_share=random.choice([0.0, 0.0, 0.02]),
        read_share=random.choice([1.0, 1.0, 0.2]),
    )


def _draw_requests(random: Random, max_model_len: int, *, with_faults: bool) -> list[EngineCoreRequest]:
    prefixes = [[random.randrange(VOCAB) for _ in range(max_model_len // 2)] for _ in range(3)]
    requests = []
    arrival = 0.0
    constrained = random.choice([0.0, 0.0, 0.3])
    for number in range(random.randint(2, 24)):
        length = random.randint(1, max_model_len - 1)
        shared = random.choice(prefixes)[: random.randint(0, length)] if random.random() < 0.6 else []
        prompt = shared + [random.randrange(VOCAB) for _ in range(length - len(shared))]
        arrival += random.choice([0.0, 0.001, 0.02])
        fault = None
        if with_faults and random.random() < 0.25:
            fault = {
                "phase": random.choice(["forward", "sample", "logits"]),
                "repeat": random.choice(["once", "always"]),
                "at": random.randrange(length + 6),
            }
        max_tokens = random.choice([1, 2, random.randint(1, 40)])
        request = make_request(
            f"r{number}",
            prompt,
            max_tokens,
            seed=random.randrange(100),
            sampling={
                "stop_token_ids": (random.randrange(VOCAB),) if random.random() < 0.3 else (),
                "structured_outputs": StructuredOutputParams(regex="x") if random.random() < constrained else None,
                "min_tokens": min(random.choice([0, 0, 3]), max_tokens),
            },
            eos_token_ids=(7,) if random.random() < 0.5 else (),
            arrival_time=arrival,
            priority=random.choice([0, 0, 1, -1]),
            cache_salt=random.choice([None, None, "a"]),
            fault=fault,
        )
        requests.append(request)
    return requests


def _draw_faults(random: Random) -> FaultPlan:
    """Faults of steps; those that go away are far apart, so that none strikes while another is looked into."""
    kind = random.choice(["none", "none", "forward", "sample", "slow", "death"])
    strikes = frozenset(40 * number + random.randrange(10) for number in range(5))
    return FaultPlan(
        fail_forward=strikes if kind == "forward" else frozenset(),
        fail_sample=strikes if kind == "sample" else frozenset(),
        slow_s=dict.fromkeys(strikes, 0.5) if kind == "slow" else {},
        die_at=random.randrange(60) if kind == "death" else None,
    )


class Simulation:
    """One run; see the module.

    Args:
        scenario: what happens.
        seed: of everything drawn while it runs.
        watching: more arguments of `EngineCore`.
    """

    def __init__(self, scenario: Scenario, seed: int, **watching: Any) -> None:
        self._scenario = scenario
        self._random = Random(f"run {seed}")
        self._clock = ManualClock()
        self.executor = RecordingExecutor(
            scenario.config,
            clock=self._clock,
            cost=StepCost(1e-3, 1e-5),
            faults=scenario.faults,
            lazy=scenario.lazy,
            connector=FakeWorkerConnector() if scenario.with_connector else None,
            tell_wrong_kv=not scenario.with_connector,
        )
        connector = FakeConnector(seed) if scenario.with_connector else None
        self.core = EngineCore(
            scenario.config, self.executor, self._clock, connector=connector, grammar=FakeGrammar(VOCAB), **watching
        )
        self.clients: dict[str, Client] = {}
        self.counts: Counter[str] = Counter()
        self._arrivals = sorted(scenario.requests, key=lambda request: request.arrival_time)

    def run(self) -> None:
        """Run to the end; raises ``AssertionError`` on the first broken promise."""
        try:
            for _ in range(MAX_STEPS):
                if not self._arrivals and not self.core.has_work and self.core.state.value == "ready":
                    break
                self._turn()
            else:
                raise AssertionError(f"no end after {MAX_STEPS} steps: {self._unfinished()}")
        except EngineDeadError:
            assert self._scenario.faults.die_at is not None, "the engine died unbidden"
            self.counts["deaths"] += 1
            return
        for client in self.clients.values():
            self._read(client)
        self._check_end()

    def _turn(self) -> None:
        self._arrive()
        self._disturb()
        steps_before = len(self.executor.steps)
        for client_index, outputs in self.core.step().items():
            assert client_index == 0
            for output in outputs.outputs:
                self.clients[output.request_id].unread.append(output)
        if self.core.stalled:
            self._clock.advance(STALLED_S)
        for client in self.clients.values():
            if client.unread and self._random.random() < self._scenario.read_share:
                self._read(client)
        self._check_books(self.executor.steps[steps_before:])
        self.counts["steps"] += 1

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].arrival_time <= self._clock.monotonic():
            request = self._arrivals.pop(0)
            limit = self._scenario.config.max_model_len
            constrained = request.sampling.structured_outputs is not None
            expected = expected_output(
                request,
                vocab_size=VOCAB,
                max_model_len=limit,
                forbidden=partial(forbidden_tokens, VOCAB) if constrained else None,
            )
            self.clients[request.request_id] = Client(request, expected)
            self.core.add_request(request)
        if self._arrivals and not self.core.has_work:
            self._clock.advance(max(0.0, self._arrivals[0].arrival_time - self._clock.monotonic()))

    def _disturb(self) -> None:
        random = self._random
        for client in self.clients.values():
            if random.random() < self._scenario.abort_share / 10:
                client.aborted = True
                self.core.abort_soon([client.request.request_id, "unknown"])
                self.counts["aborts"] += 1
        if self.core.state.value == "sleeping":
            self.core.control(Wake())
        elif random.random() < self._scenario.verb_share:
            verbs: list[AnyControl] = [ResetPrefixCache(), ResetPrefixCache(reset_running=True), Sleep()]
            verb = random.choice(verbs)
            self.core.control(verb)
            self.counts[type(verb).__name__] += 1

    def _read(self, client: Client) -> None:
        outputs, client.unread = client.unread, []
        for output in outputs:
            assert client.end is None, f"{output.request_id} ended and goes on"
            client.tokens += output.new_token_ids
            expected = client.expected.token_ids
            assert client.tokens == expected[: len(client.tokens)], f"{output.request_id} got wrong tokens"
            if output.finish_reason is not None:
                client.end = output
                self.counts[output.finish_reason.value] += 1

    def _check_books(self, steps: list[SchedulerOutput]) -> None:
        self.core.scheduler.kv.check_invariants()
        self.core.scheduler.check_invariants()
        assert not self.executor.violations, self.executor.violations
        section = self._scenario.config.scheduler
        for step in steps:
            assert section.max_num_scheduled_tokens is not None
            assert step.total_num_scheduled_tokens <= section.max_num_scheduled_tokens
            assert len(step.num_scheduled_tokens) <= section.max_num_seqs
            assert all(count > 0 for count in step.num_scheduled_tokens.values())

    def _check_end(self) -> None:
        for client in self.clients.values():
            self._check_client(client)
        assert self.core.scheduler.kv.pool.num_free == self.core.scheduler.kv.pool.num_usable, "blocks are lost"

    def _check_client(self, client: Client) -> None:
        request_id, fault = client.request.request_id, client.request.fault
        if client.end is None or client.end.finish_reason is FinishReason.ABORT:
            assert client.aborted, f"{request_id} never ended"
            return
        if client.end.finish_reason is FinishReason.ERROR:
            # A fault that strikes once may do so when its request is alone under suspicion.
            excused = fault is not None
            refused = "the engine is" in (client.end.error or "")
            assert excused or refused, f"{request_id} failed: {client.end.error}"
            return
        assert client.tokens == client.expected.token_ids, f"{request_id} got too few tokens"
        assert client.end.finish_reason is client.expected.finish_reason
        assert client.end.stop_reason == client.expected.stop_reason

    def _unfinished(self) -> list[str]:
        return [key for key, client in self.clients.items() if client.end is None and not client.aborted]


def simulate(seed: int, *, depth: int | None = None, policy: str | None = None) -> Simulation:
    """Run one seed and return the finished run; what it raises names the call that repeats it."""
    simulation = Simulation(make_scenario(seed, depth=depth, policy=policy), seed)
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"repeat with: simulate({seed}, depth={depth}, policy={policy!r})")
        raise
    return simulation
