"""A prefill and a decode core in virtual time, joined by an imagined network.

Cores, schedulers and KV caches are the real ones. A prompt's KV is offered when the prefill core ends its request, and
pulled by the decode core ``delay_s`` after it asked, from the very blocks: what was put there meanwhile is what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.base.clock import ManualClock
from headrace.core.engine_core import EngineCore
from headrace.kv_connector.null import NullWorkerConnector
from headrace.kv_connector.protocol import ExternalHit, LoadFailurePolicy, SendLease
from headrace.messages.outputs import EngineCoreOutput
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput
from headrace.messages.scheduler_output import BlockIds
from headrace.testing.engine_config import make_engine_config
from headrace.testing.simulated_executor import SimulatedExecutor, StepCost
from headrace.testing.tokens import expected_output

VOCAB, MAX_LEN = 1000, 128
PULL_LEASE_S = 8.0
TURN_S = 5e-3


@dataclass
class Pull:
    """A transfer that the decode side waits for."""

    request_id: str
    offer: str
    block_ids: BlockIds
    start: int
    stop: int
    due: float


@dataclass
class Network:
    """What both sides see of each other. ``num_held`` (for tests) is how much of each offer is really there."""

    clock: ManualClock
    lease_s: float
    delay_s: float
    num_held: int | None = None
    offers: dict[str, BlockIds] = field(default_factory=dict)
    pulls: dict[str, Pull] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    source: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.uint64))


class Sender:
    """The scheduler side of the prefill core."""

    load_failure_policy: LoadFailurePolicy = "recompute"

    def __init__(self, network: Network) -> None:
        self._network = network

    def get_external_hit(self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int) -> ExternalHit:
        return ExternalHit(0)

    def on_allocated(self, *_: Any) -> None:
        return None

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        if num_tokens < len(request.prompt_token_ids):
            return SendLease()
        self._network.offers[request.request_id] = tuple(list(ids) for ids in block_ids)
        return SendLease(self._network.lease_s, {"offer": request.request_id, "num_tokens": num_tokens})

    def on_expired(self, request_id: str) -> None:
        self._network.offers.pop(request_id, None)

    def make_metadata(self) -> bytes | None:
        return b"" if self._network.sent else None

    def on_output(self, output: ConnectorOutput) -> None:
        return None


class SenderWorker(NullWorkerConnector):
    """The worker side of the prefill core: its blocks are read where they lie."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def register_caches(self, caches: list[Any]) -> None:
        (self._network.source,) = caches

    def after_forward(self) -> ConnectorOutput | None:
        sent, self._network.sent = tuple(self._network.sent), []
        return ConnectorOutput(finished_sending=sent) if sent else None


class Receiver:
    """The scheduler side of the decode core: it believes what the request's parameters announce."""

    def __init__(self, network: Network, policy: LoadFailurePolicy) -> None:
        self.load_failure_policy: LoadFailurePolicy = policy
        self._network = network

    def get_external_hit(self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int) -> ExternalHit:
        announced = min((request.kv_transfer_params or {}).get("num_tokens", 0), len(request.prompt_token_ids))
        return ExternalHit(max(0, announced - num_local_tokens), is_async=True, lease_s=PULL_LEASE_S)

    def on_allocated(
        self, request: EngineCoreRequest, block_ids: BlockIds, num_local_tokens: int, num_tokens: int
    ) -> None:
        if num_tokens > num_local_tokens:
            assert request.kv_transfer_params is not None
            tables = tuple(list(ids) for ids in block_ids)
            due = self._network.clock.monotonic() + self._network.delay_s
            offer = request.kv_transfer_params["offer"]
            pull = Pull(request.request_id, offer, tables, num_local_tokens, num_tokens, due)
            self._network.pulls[request.request_id] = pull

    def on_finished(self, *_: Any) -> SendLease:
        return SendLease()

    def on_expired(self, request_id: str) -> None:
        self._network.pulls.pop(request_id, None)

    def make_metadata(self) -> bytes | None:
        return b"" if self._network.pulls else None

    def on_output(self, output: ConnectorOutput) -> None:
        return None


class ReceiverWorker(NullWorkerConnector):
    """The worker side of the decode core."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._kv: np.ndarray = np.zeros((0, 0), dtype=np.uint64)
        self._news = ConnectorOutput()

    def register_caches(self, caches: list[Any]) -> None:
        (self._kv,) = caches

    def before_forward(self, metadata: bytes | None) -> None:
        network = self._network
        received, failed, invalid = [], [], []
        for pull in [one for one in network.pulls.values() if one.due <= network.clock.monotonic()]:
            del network.pulls[pull.request_id]
            source = network.offers.pop(pull.offer, None)
            if source is None:
                failed.append(pull.request_id)
                continue
            held = pull.stop if network.num_held is None else network.num_held
            self._copy(pull, source, held)
            invalid += [i for i in pull.block_ids[0][held // self._kv.shape[1] :] if pull.stop > held]
            received.append(pull.request_id)
            network.sent.append(pull.offer)
        self._news = ConnectorOutput(
            finished_receiving=tuple(received), failed_receiving=tuple(failed), invalid_block_ids=tuple(invalid)
        )

    def after_forward(self) -> ConnectorOutput | None:
        news, self._news = self._news, ConnectorOutput()
        return news if news != ConnectorOutput() else None

    def _copy(self, pull: Pull, source: BlockIds, held: int) -> None:
        theirs, ours = self._network.source.shape[1], self._kv.shape[1]
        for position in range(pull.start, min(pull.stop, held)):
            value = self._network.source[source[0][position // theirs], position % theirs]
            self._kv[pull.block_ids[0][position // ours], position % ours] = value


class Pair:
    """Both cores and the router before them, which takes ``pause_s`` between the two."""

    def __init__(
        self,
        *,
        lease_s: float = 4.0,
        delay_s: float = 0.02,
        pause_s: float = 0.0,
        policy: LoadFailurePolicy = "recompute",
        block_sizes: tuple[int, int] = (4, 4),
        num_kv_blocks: int = 65,
        depth: int = 2,
    ) -> None:
        self.clock = ManualClock()
        self.network = Network(self.clock, lease_s, delay_s)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}
        sides = [(Sender(self.network), SenderWorker(self.network))]
        sides.append((Receiver(self.network, policy), ReceiverWorker(self.network)))  # type: ignore[arg-type]
        self.prefill, self.decode = (
            self._make_core(scheduler_side, worker_side, size, num_kv_blocks, depth)
            for (scheduler_side, worker_side), size in zip(sides, block_sizes, strict=True)
        )
        self._asked: dict[str, EngineCoreRequest] = {}
        self._pause_s = pause_s
        self._between: list[tuple[float, EngineCoreRequest]] = []

    def _make_core(self, connector: Any, worker: Any, block_size: int, num_kv_blocks: int, depth: int) -> EngineCore:
        config = make_engine_config(block_size=block_size, num_kv_blocks=num_kv_blocks, pipeline_depth=depth)
        executor = SimulatedExecutor(
            config, clock=self.clock, cost=StepCost(1e-3, 0), connector=worker, tell_wrong_kv=False
        )
        return EngineCore(config, executor, self.clock, connector=connector)

    def ask(self, request: EngineCoreRequest) -> None:
        """Send a request to the prefill core; its decode follows by itself."""
        self._asked[request.request_id] = request
        self.tokens[request.request_id] = []
        one = msgspec.structs.replace(request.sampling, max_tokens=1)
        self.prefill.add_request(msgspec.structs.replace(request, sampling=one))

    def leave(self, request_id: str) -> None:
        """The client hangs up: the router aborts wherever the request is, and asks nobody else for it."""
        self._asked.pop(request_id, None)
        for core in (self.prefill, self.decode):
            core.abort_soon([request_id])

    def turn(self) -> None:
        """One step of each core."""
        now = self.clock.monotonic()
        for entry in [one for one in self._between if one[0] <= now]:
            self._between.remove(entry)
            if entry[1].request_id in self._asked:
                self.decode.add_request(entry[1])
        self._step(self.prefill, self._on_prefilled)
        self._step(self.decode, self._on_output)
        self.clock.advance(TURN_S)

    def run(self, seconds: float | None = None) -> None:
        """Until nothing is left to do, or for some time."""
        end = self.clock.monotonic() + (60.0 if seconds is None else seconds)
        while self.clock.monotonic() < end and (seconds or self._has_work):
            self.turn()
        assert seconds or not self._has_work, "somebody waits for ever"

    @property
    def _has_work(self) -> bool:
        return bool(self._between or self.prefill.has_work or self.decode.has_work)

    def _step(self, core: EngineCore, take: Callable[[EngineCoreOutput], None]) -> None:
        for outputs in core.step().values():
            for output in outputs.outputs:
                take(output)
        core.scheduler.check_invariants()

    def _on_prefilled(self, output: EngineCoreOutput) -> None:
        request = self._asked.get(output.request_id)
        if output.finish_reason is not None and request is not None:
            found = msgspec.structs.replace(request, kv_transfer_params=dict(output.kv_transfer_params or {}))
            self._between.append((self.clock.monotonic() + self._pause_s, found))

    def _on_output(self, output: EngineCoreOutput) -> None:
        self.tokens[output.request_id] += output.new_token_ids
        if output.finish_reason is not None:
            self.ended[output.request_id] = output

    def assert_right(self, request: EngineCoreRequest) -> None:
        """It was answered as by a single engine."""
        expected = expected_output(request, vocab_size=VOCAB, max_model_len=MAX_LEN)
        assert self.tokens[request.request_id] == expected.token_ids
        assert self.ended[request.request_id].finish_reason is expected.finish_reason

    def assert_empty(self) -> None:
        """Every block of both pools is free, and nothing waits for anybody."""
        for core in (self.prefill, self.decode):
            pool = core.scheduler.kv.pool
            assert pool.num_free == pool.num_usable
            assert not core.scheduler.has_pending_transfers
