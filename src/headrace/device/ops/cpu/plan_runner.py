"""The CPU's graph: one forward, recorded once and replayed for any step that fits.

Capture happens before the first step, on the runner's persistent buffers: it runs the model with recording ops under a
guard. A PyTorch computation on rows of tokens splits the plan into pieces (PIECEWISE, see `torch_calls`); any other,
views aside, refuses the capture by name, and the model is called eagerly. The plan's rows are a parameter, so a step is
never padded.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch

from headrace.base.logging import get_logger
from headrace.device.attention.metadata import AttentionMetadata, ForwardContext
from headrace.device.distributed.groups import IntermediateTensors
from headrace.device.ops.cpu import _native
from headrace.device.ops.cpu.ops import NativeOps
from headrace.device.ops.cpu.recorder import HeadBuffers, Recorder
from headrace.device.ops.cpu.torch_calls import CaptureGuard, CaptureRefusedError, TorchCall, check_same_calls
from headrace.device.runner.graphs import (
    CapturedGraph,
    CapturedGraphs,
    Dispatch,
    ForwardInputs,
    ForwardModel,
    GraphMode,
    HeadRows,
    run_head_eagerly,
)
from headrace.device.sampling.sampler import HeadOutput

logger = get_logger(__name__)


class _HeadPlan:
    """The head as a plan of its own: gathers rows of the captured hidden states and reduces their logits."""

    def __init__(self, recorder: Recorder, index: torch.Tensor, head: HeadBuffers) -> None:
        assert isinstance(recorder.pieces[0], _native.Plan)
        # The plan reads and writes the buffers by address.
        self.recorder, self.index, self.buffers = recorder, index, head
        self.replay = _native.HeadReplay(recorder.pieces[0], index.numpy(), head.best, head.peaks).replay
        self.logits = head.logits.numpy()
        self.no_logits = self.logits[:0]
        self.ready: tuple[HeadRows, list[int], list[float]] | None = None
        """What was run with the last forward, and the best token and its logit of each row."""


def _capture_head(model: ForwardModel, ops: NativeOps, hidden: torch.Tensor, max_reqs: int) -> _HeadPlan | None:
    """The plan of the head, or nothing when a model does more to its logits than the head op does."""
    recorder = Recorder(len(hidden), max_reqs, max_reqs)
    index = torch.zeros(max_reqs, dtype=torch.int32)
    ops.set_recorder(recorder)
    try:
        with CaptureGuard():
            logits = model.compute_logits(ops.gather_rows(hidden, index))
    except CaptureRefusedError as error:
        logger.info("the head is called op by op (%s)", error)
        return None
    finally:
        ops.set_recorder(None)
    assert recorder.head is not None
    assert logits is recorder.head.logits, "logits are what the head op makes"
    recorder.finish(ops.team, [])
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
        self._num_shown = 0
        self._head: _HeadPlan | None = None
        self._context: ForwardContext | None = None
        self.captured = CapturedGraphs()

    @property
    def op_names(self) -> list[str]:
        """What a replay runs, in order, fused ops left out; empty without a plan."""
        pieces = self._recorder.pieces if self._recorder is not None else []
        return list(chain(*(p.op_names if isinstance(p, _native.Plan) else [p.name] for p in pieces)))

    def capture(self, ids: torch.Tensor, ctx: ForwardContext) -> None:
        """Record the forward of the largest step; see `GraphRunner.capture`."""
        max_tokens, max_reqs = len(ids), ctx.groups[0].num_reqs
        try:
            recorder, hidden, calls = self._record(ids, ctx)
            if calls:
                if max_tokens < 2:
                    raise CaptureRefusedError(f"{calls[0].name} in steps of a single token")
                again = self._record(ids[:-1], _smaller(ctx))[2]
                check_same_calls(calls, again)
        except CaptureRefusedError as error:
            self.captured = CapturedGraphs(why_none=str(error))
            return
        recorder.finish(self._ops.team, [hidden.data_ptr()])
        self._ops.set_progress(ctx.progress)
        # The plan reads the buffers of the context by address: they live as long as it does.
        self._recorder, self._hidden, self._context = recorder, hidden, ctx
        self._head = _capture_head(self._model, self._ops, hidden, max_reqs)
        self.captured = CapturedGraphs((_describe(calls, max_tokens, max_reqs),))

    def _record(self, ids: torch.Tensor, ctx: ForwardContext) -> tuple[Recorder, torch.Tensor, list[TorchCall]]:
        """A recording of the forward, its hidden states, and the PyTorch calls that split it."""
        recorder = Recorder(len(ids), ctx.groups[0].num_reqs, 0)
        for tensor in (ids, ctx.positions, *(group.slot_mapping for group in ctx.groups)):
            recorder.add_rows(tensor)
        for group in ctx.groups:
            for tensor in (group.query_start_loc, group.seq_lens, group.block_table):
                recorder.add_other(tensor)
        guard = CaptureGuard(recorder)
        self._ops.set_recorder(recorder)
        try:
            with guard:
                hidden = self._model.forward(ids, ctx)
        finally:
            self._ops.set_recorder(None)
        if not isinstance(hidden, torch.Tensor):
            raise CaptureRefusedError("a pipeline stage hands several tensors on")
        if not recorder.has_rows(hidden):
            raise CaptureRefusedError("the hidden states are not one row per token")
        return recorder, hidden, guard.calls

    def run(
        self, choice: Dispatch, inputs: ForwardInputs, intermediate: IntermediateTensors | None
    ) -> torch.Tensor | IntermediateTensors:
        """The model's forward; see `GraphRunner.run`."""
        if self._head is not None:
            self._head.ready = None
        if choice.mode is GraphMode.EAGER:
            return self._model.forward(*inputs.make(), intermediate)
        assert self._recorder is not None
        assert self._hidden is not None
        if len(self._recorder.pieces) == 1:
            self._replay(inputs)
        else:
            self._replay_pieces(inputs)
        if self._num_shown != inputs.num_tokens:
            self._num_shown, self._shown = inputs.num_tokens, self._hidden[: inputs.num_tokens]
        assert self._shown is not None
        return self._shown

    def _replay(self, inputs: ForwardInputs) -> None:
        """The one plan, and the head in the same call, so that threads have no time to fall asleep between them."""
        assert self._recorder is not None
        (plan,), head = self._recorder.pieces, self._head
        assert isinstance(plan, _native.Plan)
        if head is None or not inputs.head.rows:
            plan.replay(self._ops.team, inputs.num_tokens, inputs.num_reqs)
            return
        best, peaks = head.replay(self._ops.team, plan, inputs.num_tokens, inputs.num_reqs, *inputs.head)
        head.ready = (inputs.head, best, peaks)

    def _replay_pieces(self, inputs: ForwardInputs) -> None:
        assert self._recorder is not None
        assert self._context is not None
        for piece in self._recorder.pieces:
            if isinstance(piece, _native.Plan):
                piece.replay(self._ops.team, inputs.num_tokens, inputs.num_reqs)
            else:
                piece.run(inputs.num_tokens)
                self._context.progress.advance()

    def run_head(self, hidden: torch.Tensor, rows: list[int], num_best: int) -> HeadOutput:
        """The head of some rows; see `GraphRunner.run_head`."""
        head = self._head
        if head is None or hidden is not self._shown:
            return run_head_eagerly(self._model, self._ops, hidden, rows)
        if head.ready is not None and head.ready[0] == (rows, num_best):
            _, best, peaks = head.ready
        else:
            head.ready = None
            best, peaks = head.replay(self._ops.team, None, self._num_shown, 0, rows, num_best)
        num_logits = len(rows) - num_best
        return HeadOutput(best, peaks, head.logits[:num_logits] if num_logits else head.no_logits)


def _smaller(ctx: ForwardContext) -> ForwardContext:
    """A context of one token less, and of one request less where there are several."""

    def shrink(group: AttentionMetadata) -> AttentionMetadata:
        reqs = max(1, group.num_reqs - 1)
        return AttentionMetadata(
            num_tokens=group.num_tokens - 1,
            num_reqs=reqs,
            max_query_len=group.max_query_len - 1,
            max_seq_len=group.max_seq_len - 1,
            query_start_loc=group.query_start_loc[: reqs + 1],
            seq_lens=group.seq_lens[:reqs],
            block_table=group.block_table[:reqs],
            slot_mapping=group.slot_mapping[:-1],
        )

    return replace(ctx, positions=ctx.positions[:-1], groups=[shrink(group) for group in ctx.groups])


def _describe(calls: list[TorchCall], max_tokens: int, max_reqs: int) -> CapturedGraph:
    """What was captured, and why it is in pieces if it is."""
    if not calls:
        return CapturedGraph(GraphMode.FULL, max_tokens, max_reqs)
    names = ", ".join(dict.fromkeys(call.name for call in calls))
    return CapturedGraph(GraphMode.PIECEWISE, max_tokens, max_reqs, reason=f"{names} run between native operators")
