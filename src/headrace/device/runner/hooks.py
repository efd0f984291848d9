"""Parts that a step always calls and that do nothing by default.

A feature replaces one null object in `RunnerHooks`; the runner never asks whether it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headrace.device.runner.graphs import BatchDescriptor
from headrace.device.runner.input_batch import InputBatch
from headrace.kv_connector.null import NullWorkerConnector
from headrace.kv_connector.protocol import WorkerConnector
from headrace.messages.scheduler_output import SchedulerOutput


class NullBatchSync:
    """Data-parallel ranks agree on the shape of a step; alone, a rank keeps its own."""

    def sync_batch(self, descriptor: BatchDescriptor) -> BatchDescriptor:
        """The shape that all ranks dispatch on."""
        return descriptor


class NullPipeline:
    """The last pipeline stage takes hidden states before it samples; with one stage they are its own."""

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to sample from."""
        return hidden


class NullLora:
    """Adapters of the step's rows."""

    def apply(self, names: Sequence[str | None]) -> bool:
        """Put the adapters of the step's places in force; says whether any is in use."""
        return False


class NullDrafter:
    """Speculation."""

    def propose(self, batch: InputBatch, hidden: torch.Tensor) -> dict[str, list[int]]:
        """Draft tokens by request for the next step."""
        return {}


class NullEncoder:
    """Inputs that are not text."""

    def run(self, step: SchedulerOutput) -> None:
        """Encode what the step's ``encoder`` section names."""


@dataclass(slots=True)
class RunnerHooks:
    """The parts of one runner."""

    batch_sync: NullBatchSync = field(default_factory=NullBatchSync)
    pipeline: NullPipeline = field(default_factory=NullPipeline)
    connector: WorkerConnector = field(default_factory=NullWorkerConnector)
    lora: NullLora = field(default_factory=NullLora)
    drafter: NullDrafter = field(default_factory=NullDrafter)
    encoder: NullEncoder = field(default_factory=NullEncoder)
