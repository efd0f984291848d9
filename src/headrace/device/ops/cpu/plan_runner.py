"""The CPU's graph: one forward, recorded once and replayed for any step that fits.

Capture happens before the first step, on the runner's persistent buffers: it runs the model with recording ops under a
guard that refuses every PyTorch computation which is not a view, by name, since a replay would leave it out. A refused
capture leaves the model to be called eagerly. The plan's rows are a parameter, so a step is never padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.device.attention.metadata import ForwardContext
from headrace.device.distributed.groups import IntermediateTensors
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.ops.cpu.recorder import Recorder
from headrace.device.runner.graphs import CapturedGraph, CapturedGraphs, Dispatch, ForwardModel, GraphMode


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
        self._buffers: tuple[int, ...] = ()
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
        self._buffers = _addresses(ids, ctx)
        self.captured = CapturedGraphs((CapturedGraph(GraphMode.FULL, max_tokens, max_reqs),))

    def run(
        self, choice: Dispatch, ids: torch.Tensor, ctx: ForwardContext, intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        """The model's forward; see `GraphRunner.run`."""
        if choice.mode is not GraphMode.FULL:
            return self._model.forward(ids, ctx, intermediate)
        assert self._recorder is not None
        assert self._hidden is not None
        assert self._buffers == _addresses(ids, ctx), "a step's inputs moved"
        self._recorder.plan.replay(self._ops.team, len(ids), ctx.groups[0].num_reqs)
        return self._hidden[: len(ids)]


def _addresses(ids: torch.Tensor, ctx: ForwardContext) -> tuple[int, ...]:
    tensors = [ids, ctx.positions]
    for group in ctx.groups:
        tensors += [group.query_start_loc, group.seq_lens, group.block_table, group.slot_mapping]
    return tuple(tensor.data_ptr() for tensor in tensors)
