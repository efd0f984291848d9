"""The CPU's graph: one forward, recorded once and replayed for any step that fits.

Capture happens at the first step, on the runner's persistent buffers: it runs the model with recording ops under a
guard that refuses every PyTorch computation which is not a view, by name, since a replay would leave it out. A refused
capture leaves the model to be called eagerly. The plan's rows are a parameter, so a step is never padded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.logging import get_logger
from headrace.device.attention.metadata import AttentionMetadata, ForwardContext
from headrace.device.distributed.groups import IntermediateTensors
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.ops.cpu.recorder import Recorder
from headrace.device.runner.graphs import CapturedGraph, CapturedGraphs, Dispatch, ForwardModel, GraphMode

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


class PlanRunner:
    """Replays the captured plan; see `GraphRunner`.

    Args:
        model, ops: what is recorded.
        max_tokens, max_reqs: the largest step, which the runner's buffers hold.
    """

    def __init__(self, model: ForwardModel, ops: NativeOps, max_tokens: int, max_reqs: int) -> None:
        self._model = model
        self._ops = ops
        self._max_tokens = max_tokens
        self._max_reqs = max_reqs
        self._recorder: Recorder | None = None
        self._hidden: torch.Tensor | None = None
        self._buffers: tuple[int, ...] = ()
        self._context: ForwardContext | None = None
        self.captured = CapturedGraphs((CapturedGraph(GraphMode.FULL, max_tokens, max_reqs),))

    @property
    def op_names(self) -> list[str]:
        """The captured ops, fused ones left out; empty before the first step."""
        return self._recorder.plan.op_names if self._recorder is not None else []

    def run(
        self, choice: Dispatch, ids: torch.Tensor, ctx: ForwardContext, intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        """The model's forward; see `GraphRunner.run`."""
        if choice.mode is GraphMode.FULL and self._recorder is None:
            self._capture(ids, ctx, intermediate)
        if choice.mode is not GraphMode.FULL or self._recorder is None:
            return self._model.forward(ids, ctx, intermediate)
        assert self._buffers == _addresses(ids, ctx), "a step's inputs moved"
        assert self._hidden is not None
        self._recorder.plan.replay(self._ops.team, len(ids), ctx.groups[0].num_reqs)
        return self._hidden[: len(ids)]

    def _capture(self, ids: torch.Tensor, ctx: ForwardContext, intermediate: IntermediateTensors | None) -> None:
        recorder = Recorder(self._max_tokens, self._max_reqs, 0)
        whole = replace(ctx, positions=_whole(ctx.positions), groups=[_whole_group(group) for group in ctx.groups])
        self._ops.set_recorder(recorder)
        try:
            with _Guard():
                hidden = self._model.forward(_whole(ids)[: self._max_tokens], whole, intermediate)
            if not isinstance(hidden, torch.Tensor):
                raise CaptureRefusedError("a pipeline stage hands several tensors on")
        except CaptureRefusedError as error:
            logger.warning("no plan was captured: %s", error)
            self.captured = CapturedGraphs(why_none=str(error))
            return
        finally:
            self._ops.set_recorder(None)
        recorder.plan.finish(self._ops.team, [hidden.data_ptr()])
        self._ops.team.set_progress(ctx.progress.address)
        self._recorder, self._hidden, self._context = recorder, hidden, whole
        self._buffers = _addresses(ids, ctx)


def _addresses(ids: torch.Tensor, ctx: ForwardContext) -> tuple[int, ...]:
    tensors = [ids, ctx.positions]
    for group in ctx.groups:
        tensors += [group.query_start_loc, group.seq_lens, group.block_table, group.slot_mapping]
    return tuple(tensor.data_ptr() for tensor in tensors)


def _whole(view: torch.Tensor) -> torch.Tensor:
    """All of the buffer that a step shows the front of."""
    assert view.storage_offset() == 0
    total = view.untyped_storage().nbytes() // view.element_size()
    if view.dim() == 1:
        return view.as_strided((total,), (1,))
    return view.as_strided((total // view.stride(0), view.shape[1]), view.stride())


def _whole_group(group: AttentionMetadata) -> AttentionMetadata:
    return replace(
        group,
        query_start_loc=_whole(group.query_start_loc),
        seq_lens=_whole(group.seq_lens),
        block_table=_whole(group.block_table),
        slot_mapping=_whole(group.slot_mapping),
    )
