"""The native operators: `Ops` over the kernels of ``csrc/cpu``.

Each method checks shapes (in the binding), takes a buffer for the result and makes an op. Without a capture the op runs
at once; during one it is recorded and nothing is computed. Results depend on `docs/numerics.md` alone: not on the
instruction set, the number of threads, the batch, or whether a plan replays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from headrace.base.errors import ConfigError
from headrace.base.progress import ProgressWord
from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.ops.cpu import _native
from headrace.device.ops.cpu.arena import Arena
from headrace.device.ops.cpu.recorder import Recorder
from headrace.device.ops.cpu.sampling import NativeSampling
from headrace.device.ops.interface import (
    Activation,
    AttentionShape,
    PackedStore,
    StepInputs,
    StepMemory,
    Weight,
    WeightRole,
)
from headrace.device.quantization.raw_tensor import RawTensor
from headrace.device.runner.graphs import MAX_LOGIT_ROWS

Activations = Literal["exact", "int8"]


def available_isas() -> list[str]:
    """Instruction sets that were compiled in and that this CPU has, the best first."""
    return _native.isas()


class NativeOps:
    """See the module.

    Args:
        num_threads: threads of the team, the calling one included.
        activations: how quantised weights are multiplied; float weights are always multiplied exactly.
        isa: instruction set; the best one by default.
        quantization: turn float matrices into this format when they are packed.

    Raises:
        ConfigError: the instruction set is not available.
    """

    name = "native"

    def __init__(
        self,
        num_threads: int,
        activations: Activations = "int8",
        isa: str | None = None,
        quantization: Literal["int8", "int4"] | None = None,
    ) -> None:
        try:
            self.team = _native.Team(num_threads, isa or "")
        except ValueError as error:
            raise ConfigError(f"HEADRACE_ISA: {error}") from None
        self.sampling = NativeSampling(self.team)
        self._exact = activations == "exact"
        self._quantization = quantization or ""
        self._arena = Arena()
        self._recorder: Recorder | None = None
        self._step: tuple[AttentionMetadata, _native.StepView] | None = None
        self._packed: PackedStore | None = None
        self._progress: ProgressWord | None = None

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self.team.isa

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record ops instead of running them, until called with ``None``."""
        self._recorder = recorder

    def set_progress(self, word: ProgressWord | None) -> None:
        """Advance ``word``, or nothing, with every op from now on. It is kept: the team writes to its address."""
        self.team.set_progress(word.address if word is not None else 0)
        self._progress = word

    def set_packed_store(self, store: PackedStore | None) -> None:
        self._packed = store

    def pack_weight(self, parts: Sequence[RawTensor], role: WeightRole) -> Weight:
        width, gated = parts[0].shape[1], role == "gate_up"
        # Float embeddings stay as they are: a row is read, not multiplied.
        quantize = self._quantization if role != "embedding" else ""
        forms = [(_packable_format(part), len(part.data)) for part in parts]
        form = f"{forms} {width} {quantize} {gated}"
        if self._packed is not None and (pieces := self._packed.take(form)) is not None:
            return _native.adopt(self.team, forms, width, quantize, gated, list(pieces))
        weight = _native.pack(self.team, [_source(part) for part in parts], width, quantize, gated)
        if self._packed is not None:
            self._packed.keep(form, weight.pieces)
        return weight

    def embedding(self, ids: torch.Tensor, table: Weight, scale: float = 1.0) -> torch.Tensor:
        out = self._take(len(ids), table.in_features)
        self._run(_native.embedding(ids, table, scale, out), len(ids))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self._like(x)
        self._run(_native.norm(x, None, weight, eps, out, None, self._rows(x)), len(x))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._like(x)
        self._run(_native.norm(x, residual, weight, eps, out, residual, self._rows(x)), len(x))
        return out, residual

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._run(_native.add(x, y, x, self._rows(x)), len(x))
        return x

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._linear(x, weight, bias, 0.0)

    def gated_linear(self, x: torch.Tensor, gate_up: Weight, activation: Activation) -> torch.Tensor:
        out = self._take(len(x), gate_up.out_features // 2, x)
        self._run(_native.gated(x, gate_up, activation, self._exact, out, self._rows(x)), len(x))
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        shape: AttentionShape,
        meta: AttentionMetadata,
        cache: LayerCache,
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        out = self._take(len(qkv), shape.num_heads * shape.head_dim)
        q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
        view = _native.cache(cache.key, cache.value, cache.scales)
        step = self._step_view(meta)
        op = _native.rope(qkv, positions, cos_sin, shape.num_heads, step, view, q_norm, k_norm, eps, out)
        self._run(op, len(qkv), meta.num_reqs)
        return out

    def attention(
        self, q: torch.Tensor, shape: AttentionShape, meta: AttentionMetadata, cache: LayerCache
    ) -> torch.Tensor:
        out = self._like(q)
        view = _native.cache(cache.key, cache.value, cache.scales)
        op = _native.attention(
            q,
            shape.num_heads,
            shape.scale,
            shape.window,
            shape.chunk,
            shape.softcap,
            shape.sinks,
            self._exact,
            self._step_view(meta),
            view,
            out,
        )
        self._run(op, len(q), meta.num_reqs)
        return out

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self._recorder is not None:
            out = self._recorder.take_logit_rows(len(rows), x.shape[1])
        else:
            out = self._arena.take(len(rows), x.shape[1])
        self._run(_native.gather(x, rows, out), len(x), num_logit_rows=len(rows))
        return out

    def logits(self, x: torch.Tensor, head: Weight, softcap: float = 0.0) -> torch.Tensor:
        if self._recorder is not None:
            to = self._recorder.make_head(head.out_features, MAX_LOGIT_ROWS)
            self._recorder.append(_native.head(x, head, softcap, self._exact, to.best, to.peaks, to.memory))
            return to.logits
        return self._linear(x, head, None, softcap)

    def moe(
        self,
        x: torch.Tensor,
        router: Weight,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        top_k: int,
        activation: Activation,
        renormalize: bool,
    ) -> torch.Tensor:
        out = self._like(x)
        op = _native.moe(x, router, list(gate_up), list(down), top_k, activation, renormalize, self._exact, out)
        self._run(op, len(x))
        return out

    def arg_max(self, logits: torch.Tensor) -> torch.Tensor:
        """The greatest column of each row, the lowest one of equals: int32 ``[R']``."""
        out = torch.empty(len(logits), dtype=torch.int32)
        self._run(_native.arg_max(logits, out), len(logits), num_logit_rows=len(logits))
        return out

    def make_step_inputs(self, memory: StepMemory) -> StepInputs:
        groups = [(g.table, g.num_blocks, g.block_size, g.step_table, g.slots) for g in memory.groups]
        inputs = (memory.token_ids, memory.ids, memory.positions, memory.query_start_loc, memory.seq_lens)
        return _native.StepInputs(*inputs, groups)

    def _linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, softcap: float) -> torch.Tensor:
        out = self._take(len(x), weight.out_features, x)
        op = _native.linear(x, weight, bias, softcap, self._exact, out, self._rows(x))
        self._run(op, len(x))
        return out

    def _step_view(self, meta: AttentionMetadata) -> _native.StepView:
        """The binding's form of a step's metadata; all layers of a group share one object."""
        if self._step is None or self._step[0] is not meta:
            view = _native.step(meta.query_start_loc, meta.seq_lens, meta.block_table, meta.slot_mapping)
            self._step = (meta, view)
        return self._step[1]

    def _rows(self, x: torch.Tensor) -> _native.Rows:
        return _native.Rows.TOKENS if self._recorder is None else self._recorder.rows_of(x)

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        return self._take(len(x), x.shape[1], x)

    def _take(self, rows: int, width: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """A buffer for ``rows`` rows of the kind of ``like``."""
        if self._recorder is None:
            return self._arena.take(rows, width)
        return self._recorder.take(rows, width, like)

    def _run(self, op: _native.Op, rows: int, num_reqs: int = 0, num_logit_rows: int = 0) -> None:
        if self._recorder is not None:
            self._recorder.append(op)
        else:
            self.team.run(op, rows, num_reqs, num_logit_rows)


def _packable_format(part: RawTensor) -> str:
    """In which format the packer takes a tensor: the file's where it knows it, floats otherwise."""
    return part.format.name if _native.is_packable(part.format.name) else "F32"


def _source(part: RawTensor) -> tuple[str, np.ndarray]:
    """What the packer takes."""
    name = _packable_format(part)
    return name, np.ascontiguousarray(part.data) if name == part.format.name else part.dequantize().view(np.uint8)
