"""The CPU's graph: one forward, recorded once and replayed for any step that fits.

Capture happens before the first step, on the runner's persistent buffers: it runs the model with recording ops under a
guard that refuses every PyTorch computation which is not a view, by name, since a replay would leave it out. A refused
capture leaves the model to be called eagerly. The plan's rows are a parameter, so a step is never padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.logging import get_logger
from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import IntermediateTensors
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.ops.cpu.recorder import HeadBuffers, Recorder
from headrace.device.runner.graphs import (
    CapturedGraph,
    CapturedGraphs,
    Dispatch,
    ForwardInputs,
    ForwardModel,
    GraphMode,
    run_head_eagerly,
)
from headrace.device.sampling.sampler import HeadOutput

logger = get_logger(__name__)


class CaptureRefusedError(Exception):
    """The forward does something that a plan cannot hold."""


class _Guard(TorchDispatchMode):
    """Lets views pass and refuses everything else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would load its compiler to keep it away from this class: seconds and 100 MB, and no compiler runs."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_view(func):
            raise CaptureRefusedError(f"{func.name()} is not a native operator")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class _HeadPlan:
    """The head as a plan of its own: gathers rows of the captured hidden states and reduces their logits."""

    def __init__(self, recorder: Recorder, index: torch.Tensor, head: HeadBuffers) -> None:
        self.recorder = recorder
        self.index = index.numpy()
        self.best, self.peaks, self.logits = head.best, head.peaks, head.logits.numpy()


def _capture_head(model: ForwardModel, ops: NativeOps, hidden: torch.Tensor, max_reqs: int) -> _HeadPlan | None:
    """The plan of the head, or nothing when a model does more to its logits than the head op does."""
    recorder = Recorder(len(hidden), max_reqs, max_reqs)
    index = torch.zeros(max_reqs, dtype=torch.int32)
    ops.set_recorder(recorder)
    try:
        with _Guard():
            logits = model.compute_logits(ops.gather_rows(hidden, index))
    except CaptureRefusedError as error:
        logger.info("the head is called op by op (%s)", error)
        return None
    finally:
        ops.set_recorder(None)
    assert recorder.head is not None
    assert logits is recorder.head.logits, "logits are what the head op makes"
    recorder.plan.finish(ops.team, [])
    return _HeadPlan(recorder, index, recorder.head)


class PlanRunner:
    """Replays the captured plan; see `GraphRunner`.

    Args:
        model, ops: what is recorded.
    """

    def __init__(self, model: ForwardModel, ops: NativeOps) -> None:
        self._model = model
        self._ops = ops
        self._recorder: Recorder | None = None
        self._hidden: torch.Tensor | None = None
        self._shown: torch.Tensor | None = None
        self._head: _HeadPlan | None = None
        self._context: ForwardContext | None = None
        self.captured = CapturedGraphs()

    @property
    def op_names(self) -> list[str]:
        """The captured ops, fused ones left out; empty without a plan."""
        return self._recorder.plan.op_names if self._recorder is not None else []

    def capture(self, ids: torch.Tensor, ctx: ForwardContext) -> None:
        """Record the forward of the largest step; see `GraphRunner.capture`."""
        max_tokens, max_reqs = len(ids), ctx.groups[0].num_reqs
        recorder = Recorder(max_tokens, max_reqs, 0)
        self._ops.set_recorder(recorder)
        try:
            with _Guard():
                hidden = self._model.forward(ids, ctx)
            if not isinstance(hidden, torch.Tensor):
                raise CaptureRefusedError("a pipeline stage hands several tensors on")
        except CaptureRefusedError as error:
            self.captured = CapturedGraphs(why_none=str(error))
            return
        finally:
            self._ops.set_recorder(None)
        recorder.plan.finish(self._ops.team, [hidden.data_ptr()])
        self._ops.team.set_progress(ctx.progress.address)
        # The plan reads the buffers of the context by address: they live as long as it does.
        self._recorder, self._hidden, self._context = recorder, hidden, ctx
        self._head = _capture_head(self._model, self._ops, hidden, max_reqs)
        self.captured = CapturedGraphs((CapturedGraph(GraphMode.FULL, max_tokens, max_reqs),))

    def run(
        self, choice: Dispatch, inputs: ForwardInputs, intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        """The model's forward; see `GraphRunner.run`."""
        if choice.mode is not GraphMode.FULL:
            return self._model.forward(*inputs.make(), intermediate)
        assert self._recorder is not None
        assert self._hidden is not None
        self._recorder.plan.replay(self._ops.team, inputs.num_tokens, inputs.num_reqs)
        if self._shown is None or len(self._shown) != inputs.num_tokens:
            self._shown = self._hidden[: inputs.num_tokens]
        return self._shown

    def run_head(self, hidden: torch.Tensor, rows: list[int], num_best: int) -> HeadOutput:
        """The head of some rows; see `GraphRunner.run_head`."""
        head, count = self._head, len(rows)
        if head is None or hidden is not self._shown:
            return run_head_eagerly(self._model, self._ops, hidden, rows)
        head.index[:count] = rows
        head.recorder.plan.replay(self._ops.team, len(hidden), 0, count, num_best)
        return HeadOutput(head.best[:count], head.peaks[:count], head.logits[: count - num_best])
