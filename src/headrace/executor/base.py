"""The executor: one, many or Ray workers behind one interface.

Calls are executed in the order in which they are made (a FIFO per rank), which is what lets the core keep several steps
in flight without a lock: ``execute(N), execute(N + 1), sample(N + 1), execute(N + 2), …``, with a sampling of its own
for each step that has rows under a grammar.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headrace.messages.kv_cache import KVCacheConfig, KVCacheSpec
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ExecutorReady:
    """What loaded workers report.

    ``layer_specs`` has one entry per layer of the model, in order. ``available_bytes`` is what KV blocks may take.
    ``attention`` is the chosen backend with its reason, ``refused`` maps every other one to why it was not chosen.
    """

    layer_specs: list[KVCacheSpec]
    available_bytes: int
    vocab_size: int
    attention: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)


class Executor(ABC):
    """Runs steps. Every method but `start` and `shutdown` may be called only between them."""

    @abstractmethod
    def start(self) -> ExecutorReady:
        """Load the model; raises `ModelFileError` or `ConfigError` with the remedy."""

    @abstractmethod
    def initialize_kv_cache(self, config: KVCacheConfig) -> GraphSummary:
        """Allocate blocks and capture graphs."""

    @abstractmethod
    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        """Run the forward and sample it, unless rows of the step are under a grammar.

        ``None`` means that `sample_tokens` must follow with the bitmask of those rows, before any other step.

        An exception of the forward is the future's exception; the worker stays usable.
        """

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample the last forward, which returned ``None``."""

    @abstractmethod
    def control(self, request: AnyControl) -> Any:
        """Apply a control verb on every worker and return rank 0's value; raises on failure."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise `EngineDeadError` with the root cause when a worker is gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. Idempotent, bounded in time."""
