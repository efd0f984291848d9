"""Which captured graph a step may replay, and how a forward is run.

`dispatch` is a pure function of the step's shape and of what was captured. The same interface serves CUDA graphs (fixed
sizes, padded up to) and the CPU's captured plan (rows are a parameter, no padding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import IntermediateTensors
from headrace.device.ops.interface import Ops
from headrace.device.sampling.sampler import HeadOutput
from headrace.messages.outputs import GraphSummary

MAX_LOGIT_ROWS = 64
"""Rows whose logits are held at once: 13 MB for a vocabulary of 49,152."""


class GraphMode(str, Enum):
    """How much of a forward is replayed: all, all but some parts, nothing."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    EAGER = "EAGER"


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The shape of a step as far as graphs depend on it. ``uniform_query_len`` is 0 when query lengths differ."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int = 0
    has_lora: bool = False


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What one graph can replay.

    Attributes:
        max_tokens, max_reqs: the largest step.
        uniform_query_len: the only query length it knows, or 0 for any mix.
        pads: whether a smaller step must be padded to ``max_tokens``.
        reason: why it holds pieces alone; empty for a whole forward.
    """

    mode: GraphMode
    max_tokens: int
    max_reqs: int
    uniform_query_len: int = 0
    has_lora: bool = False
    pads: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """All that was captured; ``why_none`` says why a step without a graph has none."""

    graphs: tuple[CapturedGraph, ...] = ()
    why_none: str = "no graph was captured"


def summarize(captured: CapturedGraphs) -> GraphSummary:
    """What capture gave, for people."""
    if not captured.graphs:
        return GraphSummary(mode=GraphMode.EAGER.value, reason=captured.why_none)
    best = min(captured.graphs, key=lambda graph: graph.mode is not GraphMode.FULL)
    return GraphSummary(
        mode=best.mode.value,
        reason=best.reason or "the whole forward was captured",
        sizes=[(graph.max_tokens, graph.max_reqs) for graph in captured.graphs],
    )


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The choice for a step. ``num_tokens`` includes padding; ``graph`` is ``None`` under EAGER."""

    mode: GraphMode
    reason: str
    num_tokens: int
    graph: CapturedGraph | None = None


def dispatch(descriptor: BatchDescriptor, captured: CapturedGraphs) -> Dispatch:
    """The smallest fitting graph, FULL before PIECEWISE before EAGER."""
    refusals: dict[str, None] = {}
    fitting = []
    for graph in captured.graphs:
        why_not = _refuse(graph, descriptor)
        if why_not is None:
            fitting.append(graph)
        else:
            refusals[f"{graph.mode.value}: {why_not}"] = None
    if not fitting:
        return Dispatch(GraphMode.EAGER, "; ".join(refusals) or captured.why_none, descriptor.num_tokens)
    best = min(fitting, key=lambda g: (g.mode is not GraphMode.FULL, g.max_tokens, g.max_reqs))
    size = best.max_tokens if best.pads else descriptor.num_tokens
    if best.mode is GraphMode.FULL:
        reason = "fits a captured graph"
    else:
        reason = "; ".join(r for r in refusals if r.startswith("FULL")) or best.reason or "only pieces were captured"
    return Dispatch(best.mode, reason, size, best)


def _refuse(graph: CapturedGraph, descriptor: BatchDescriptor) -> str | None:
    if descriptor.num_tokens > graph.max_tokens:
        return f"{descriptor.num_tokens} tokens exceed {graph.max_tokens}"
    if descriptor.num_reqs > graph.max_reqs:
        return f"{descriptor.num_reqs} requests exceed {graph.max_reqs}"
    if graph.uniform_query_len not in (0, descriptor.uniform_query_len):
        return f"query lengths are not all {graph.uniform_query_len}"
    if descriptor.has_lora != graph.has_lora:
        return "adapters are in use" if descriptor.has_lora else "captured for adapters"
    return None


class ForwardModel(Protocol):
    """A model, or the part of it that a pipeline stage holds."""

    def forward(
        self, ids: torch.Tensor, ctx: ForwardContext, intermediate: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states ``[T, H]``, or what the next stage takes."""
        ...

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[R', V]``."""
        ...


class HeadRows(NamedTuple):
    """Rows of the hidden states whose head is wanted; the first ``num_best`` need no logits."""

    rows: list[int]
    num_best: int


_NO_ROWS = HeadRows([], 0)


@dataclass(slots=True)
class ForwardInputs:
    """A step's inputs, which lie in persistent buffers. Their tensors are made only for those who call the model.

    ``head`` is what `GraphRunner.run_head` will be asked for next, for those who can run it with the forward.
    """

    num_tokens: int
    num_reqs: int
    make: Callable[[], tuple[torch.Tensor, ForwardContext]]
    head: HeadRows = _NO_ROWS


class GraphRunner(Protocol):
    """Runs forwards, by replay where a graph was captured."""

    captured: CapturedGraphs

    def capture(self, ids: torch.Tensor, ctx: ForwardContext) -> None:
        """Record what can be replayed; called once, before the first step, with all of the persistent buffers."""
        ...

    def run(
        self, choice: Dispatch, inputs: ForwardInputs, intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        """The model's forward for a step that was dispatched as ``choice``."""
        ...

    def run_head(self, hidden: torch.Tensor, rows: list[int], num_best: int) -> HeadOutput:
        """The head for some rows of what `run` returned last.

        Args:
            rows: rows of ``hidden``; at most ``num_best + MAX_LOGIT_ROWS``.
            num_best: that many rows, the first ones, need no logits.
        """
        ...


def run_head_eagerly(model: ForwardModel, ops: Ops, hidden: torch.Tensor, rows: list[int]) -> HeadOutput:
    """All logits of the rows, then the best of each."""
    logits = model.compute_logits(ops.gather_rows(hidden, torch.tensor(rows, dtype=torch.int32)))
    return HeadOutput.of_logits(logits.float().cpu().numpy())


@dataclass(slots=True)
class EagerRunner:
    """Captures nothing and calls the model."""

    model: ForwardModel
    ops: Ops
    captured: CapturedGraphs = field(default_factory=CapturedGraphs)

    def capture(self, ids: torch.Tensor, ctx: ForwardContext) -> None:
        pass

    def run(
        self, choice: Dispatch, inputs: ForwardInputs, intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        assert choice.mode is GraphMode.EAGER
        return self.model.forward(*inputs.make(), intermediate)

    def run_head(self, hidden: torch.Tensor, rows: list[int], num_best: int) -> HeadOutput:
        return run_head_eagerly(self.model, self.ops, hidden, rows)
