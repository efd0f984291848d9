"""A KV connector whose other side is imagined: prompts' KV appears late, broken, in part or never.

Scheduler side and worker side share only the metadata, like those of a real connector. What happens to each load is
drawn from the seed by request id. The worker side writes what `SimulatedExecutor` expects in a block: running hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.kv_connector.protocol import ExternalHit, LoadFailurePolicy, SendLease
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput
from headrace.messages.scheduler_output import BlockIds
from headrace.testing.tokens import extend_hash

Fate = Literal["good", "failed", "invalid", "never"]
LEASE_S = 0.2


class Load(msgspec.Struct, frozen=True):
    """Fill the blocks of tokens ``start`` to ``len(token_ids)``."""

    request_id: str
    token_ids: list[int]
    start: int
    block_ids: tuple[list[int], ...]
    num_steps: int
    fate: Fate


class Metadata(msgspec.Struct, frozen=True):
    """From the scheduler side to the worker side, each step."""

    loads: list[Load]
    expired: list[str]


@dataclass(frozen=True, slots=True)
class FakeHits:
    """How often prompts have KV elsewhere, and what becomes of the loads."""

    share: float = 0.5
    undecided: float = 0.2
    is_async: float = 0.7
    fates: tuple[Fate, ...] = ("good", "good", "good", "failed", "invalid", "never")
    max_steps: int = 5


class FakeConnector:
    """Scheduler side."""

    def __init__(
        self,
        seed: int,
        hits: FakeHits | None = None,
        policy: LoadFailurePolicy = "recompute",
    ) -> None:
        self.load_failure_policy: LoadFailurePolicy = policy
        self._seed = seed
        self._hits = hits or FakeHits()
        self._asked: dict[str, int] = {}
        self._loads: list[Load] = []
        self._expired: list[str] = []
        self._open: set[str] = set()
        self._is_async: dict[str, bool] = {}

    def get_external_hit(
        self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int
    ) -> ExternalHit | None:
        random = Random(f"{self._seed}/{request.request_id}")
        self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        if random.random() < self._hits.undecided and self._asked[request.request_id] == 1:
            return None
        length = random.randrange(len(request.prompt_token_ids) + 1)
        if random.random() > self._hits.share or length <= num_local_tokens:
            return ExternalHit(0)
        is_async = random.random() < self._hits.is_async
        self._is_async[request.request_id] = is_async
        return ExternalHit(length - num_local_tokens, is_async, LEASE_S)

    def on_allocated(
        self,
        request: EngineCoreRequest,
        block_ids: BlockIds,
        num_local_tokens: int,
        num_tokens: int,
    ) -> None:
        if num_tokens == num_local_tokens:
            return
        random = Random(f"{self._seed}/{request.request_id}/{self._asked[request.request_id]}")
        fate = random.choice(self._hits.fates)
        num_steps = random.randint(1, self._hits.max_steps)
        if not self._is_async[request.request_id]:
            fate, num_steps = ("invalid" if fate == "invalid" else "good"), 0
        tables = tuple(list(ids) for ids in block_ids)
        tokens = request.prompt_token_ids[:num_tokens]
        self._loads.append(Load(request.request_id, tokens, num_local_tokens, tables, num_steps, fate))
        if num_steps:
            self._open.add(request.request_id)

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        return SendLease()

    def on_expired(self, request_id: str) -> None:
        self._expired.append(request_id)
        self._open.discard(request_id)

    def make_metadata(self) -> bytes | None:
        if not (self._loads or self._expired or self._open):
            return None
        metadata = msgspec.msgpack.encode(Metadata(self._loads, self._expired))
        self._loads, self._expired = [], []
        return metadata

    def on_output(self, output: ConnectorOutput) -> None:
        self._open -= {*output.finished_receiving, *output.failed_receiving}


class FakeWorkerConnector:
    """Worker side."""

    def __init__(self) -> None:
        self._kv: np.ndarray = np.zeros((0, 0), dtype=np.uint64)
        self._pending: dict[str, tuple[int, Load]] = {}
        self._invalid: list[int] = []
        self._received: list[str] = []
        self._failed: list[str] = []

    def register_caches(self, caches: list[Any]) -> None:
        (self._kv,) = caches

    def before_forward(self, metadata: bytes | None) -> None:
        if metadata is None:
            return
        decoded = msgspec.msgpack.decode(metadata, type=Metadata)
        for request_id in decoded.expired:
            self._pending.pop(request_id, None)
        for load in decoded.loads:
            self._pending[load.request_id] = (load.num_steps, load)
        for request_id, (num_steps, load) in list(self._pending.items()):
            if load.fate == "never":
                continue
            if num_steps:
                self._pending[request_id] = (num_steps - 1, load)
            else:
                del self._pending[request_id]
                self._finish(load)

    def after_forward(self) -> ConnectorOutput | None:
        output = ConnectorOutput(
            finished_receiving=tuple(self._received),
            failed_receiving=tuple(self._failed),
            invalid_block_ids=tuple(self._invalid),
        )
        self._received, self._failed, self._invalid = [], [], []
        return output if output != ConnectorOutput() else None

    def _finish(self, load: Load) -> None:
        if load.fate == "failed":
            self._failed.append(load.request_id)
            return
        size = self._kv.shape[1]
        running = 1
        bad_from = len(load.token_ids)
        if load.fate == "invalid":
            bad_from = load.start + (len(load.token_ids) - load.start) // 2
        for position, token_id in enumerate(load.token_ids):
            running = extend_hash(running, token_id)
            if load.start <= position < bad_from:
                for table in load.block_ids:
                    if table[position // size]:
                        self._kv[table[position // size], position % size] = running
        for table in load.block_ids:
            if bad_from < len(load.token_ids):
                bad = table[bad_from // size : (len(load.token_ids) - 1) // size + 1]
                self._invalid += [block_id for block_id in bad if block_id]
        # A load that held up its step is not reported: the step itself is the report.
        if load.num_steps:
            self._received.append(load.request_id)
