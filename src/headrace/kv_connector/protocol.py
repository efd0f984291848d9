"""The two sides of a KV connector: one beside the scheduler, without torch, and one beside the model runner.

The scheduler side decides what to load and how long blocks must outlive a request; the worker side moves bytes. They
share only the opaque ``bytes`` that travel inside a `SchedulerOutput` and come back as a `ConnectorOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput
from headrace.messages.scheduler_output import BlockIds

LoadFailurePolicy = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class ExternalHit:
    """KV that the connector can bring for the tokens after a local hit.

    Attributes:
        num_tokens: beyond the local hit; 0 is no hit.
        is_async: the transfer takes longer than a step: the request waits, holding its blocks.
        lease_s: an async transfer that has not reported after this long has failed.
    """

    num_tokens: int
    is_async: bool = False
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class SendLease:
    """What a finished request leaves behind.

    Attributes:
        lease_s: how long its blocks are kept for a reader that never reports; ``None`` frees them at once.
        params: sent to the client as ``kv_transfer_params``.
    """

    lease_s: float | None = None
    params: dict[str, Any] | None = None


class SchedulerConnector(Protocol):
    """The scheduler side. Every method returns at once."""

    load_failure_policy: LoadFailurePolicy

    def get_external_hit(
        self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int
    ) -> ExternalHit | None:
        """What can be brought for a sequence of ``num_tokens`` of which ``num_local_tokens`` are here.

        ``None`` means that it is not known yet: ask again in a later step.
        """
        ...

    def on_allocated(
        self, request: EngineCoreRequest, block_ids: BlockIds, num_local_tokens: int, num_tokens: int
    ) -> None:
        """The request got blocks; tokens ``num_local_tokens`` to ``num_tokens`` are to be loaded into them."""
        ...

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        """The request ended with valid KV for ``num_tokens``; ``block_ids`` is empty when it never had blocks."""
        ...

    def on_expired(self, request_id: str) -> None:
        """A lease ran out or a transfer was given up: its blocks are about to be reused, touch them no more."""
        ...

    def make_metadata(self) -> bytes | None:
        """What the worker side must know for this step; ``None`` when there is nothing to do or to poll."""
        ...

    def on_output(self, output: ConnectorOutput) -> None:
        """News of the worker side, after the scheduler has acted on it."""
        ...


class WorkerConnector(Protocol):
    """The worker side. ``caches`` are device tensors by layer, described by the plan alone."""

    def register_caches(self, caches: list[Any]) -> None:
        """Take note of the blocks' memory."""
        ...

    def before_forward(self, metadata: bytes | None) -> None:
        """Start what the step's metadata asks for; the blocks that the forward reads must be ready afterwards."""
        ...

    def after_forward(self) -> ConnectorOutput | None:
        """Start sends and say what was learnt during the step; also called for a step without tokens."""
        ...
