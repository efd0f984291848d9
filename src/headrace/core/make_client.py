"""Picks the client of an engine core by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from headrace.config.sections import EngineConfig
from headrace.core.client import EngineCoreClient

if TYPE_CHECKING:
    from headrace.core.spawn import CoreProcess

ClientKind = Literal["inproc", "process"]

EXECUTORS = {
    "uniproc": "headrace.executor.uniproc:make_executor",
    "multiproc": "headrace.executor.multiproc:make_executor",
}


def make_client(
    config: EngineConfig,
    kind: ClientKind,
    *,
    executor: str | None = None,
    options: dict[str, Any] | None = None,
    child: CoreProcess | None = None,
) -> EngineCoreClient:
    """A client that is not started yet; ``process`` already spawns its core.

    Args:
        config: of the engine.
        kind: where the core runs.
        executor: dotted path of another executor's factory than the configuration names.
        options: plain data for that factory.
        child: for ``process``, one that was spawned earlier.
    """
    path = executor or EXECUTORS[config.parallel.executor]
    if kind == "process":
        from headrace.core.process_client import ProcessClient

        return ProcessClient(config, path, options, child=child)
    from headrace.core.inproc_client import InprocClient

    return InprocClient(config, path, options)
