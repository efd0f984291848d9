"""The connector that connects to nothing."""

from __future__ import annotations

from typing import Any

from headrace.kv_connector.protocol import ExternalHit, LoadFailurePolicy, SendLease
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput
from headrace.messages.scheduler_output import BlockIds

_NO_HIT = ExternalHit(0)
_NO_LEASE = SendLease()


class NullConnector:
    """Scheduler side: no hit, no lease."""

    load_failure_policy: LoadFailurePolicy = "fail"

    def get_external_hit(
        self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int
    ) -> ExternalHit | None:
        return _NO_HIT

    def on_allocated(
        self, request: EngineCoreRequest, block_ids: BlockIds, num_local_tokens: int, num_tokens: int
    ) -> None:
        return None

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        return _NO_LEASE

    def on_expired(self, request_id: str) -> None:
        return None

    def make_metadata(self) -> bytes | None:
        return None

    def on_output(self, output: ConnectorOutput) -> None:
        return None


class NullWorkerConnector:
    """Worker side: nothing to move."""

    def register_caches(self, caches: list[Any]) -> None:
        return None

    def before_forward(self, metadata: bytes | None) -> None:
        return None

    def after_forward(self) -> ConnectorOutput | None:
        return None
