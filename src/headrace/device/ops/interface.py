"""The operators of the engine: one typed method per op, several implementations.

`reference` (PyTorch) is always there and is the oracle; `cpu` binds the native kernels; `triton` serves CUDA. Models
and layers call ops only through this interface. An implementation owns the packed form of weights: layers hand it the
raw tensors of the file and keep the opaque `Weight` that it returns.

Shapes: ``T`` tokens of a step, ``H`` hidden size, ``R`` requests, ``V`` vocabulary. All activations are contiguous
``[T, width]`` tensors in the platform's activation dtype (float32 on CPU). Row ``t`` of every result depends on row
``t`` of the inputs alone (attention: on the request's own tokens), bit for bit, whatever other rows exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from headrace.device.attention.metadata import AttentionMetadata, LayerCache
from headrace.device.quantization.raw_tensor import RawTensor
from headrace.device.sampling.kernels import SamplingKernels

Activation = Literal["silu", "gelu", "gelu_tanh"]
WeightRole = Literal["linear", "gate_up", "embedding", "head"]


class Weight(Protocol):
    """A packed matrix ``[out_features, in_features]``. ``num_bytes`` is what it holds in memory."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


class AttentionShape(Protocol):
    """The fixed facts of one attention layer (`layers.attention.Attention` has them).

    ``window`` 0 means full attention; otherwise a query at position p sees keys in (p - window, p]. With ``chunk`` > 0
    it sees keys of its own chunk only. ``softcap`` 0 means none. ``sinks`` is float32 ``[num_heads]`` or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TableMemory:
    """One KV group: block ids of every row (int32), and where those of a step and its slots (int64) go."""

    table: np.ndarray
    num_blocks: np.ndarray
    block_size: int
    step_table: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Token ids of every row (int32 ``[rows, tokens]``), and the buffers that forwards read (int32)."""

    token_ids: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    groups: tuple[TableMemory, ...]


class StepInputs(Protocol):
    """Fills the buffers of a `StepMemory`."""

    def fill(self, rows: list[int], num_computed: list[int], num_new: list[int]) -> int:
        """Write a step; returns its tokens.

        Args:
            rows, num_computed, num_new: one entry per request in batch order: its row, the tokens computed
                before and those to compute now.

        Raises:
            IndexError: a row, a token or a block does not exist, or the buffers are too small; nothing is written.
        """
        ...

    def pad(self, reqs: int, begin: int, end: int) -> None:
        """Make padding of tokens ``begin`` to ``end``: no slot, and no request behind ``reqs``."""
        ...


class PackedStore(Protocol):
    """Keeps packed weights from one load to the next, in the order in which they are packed."""

    def take(self, form: str) -> Sequence[np.ndarray] | None:
        """The bytes of the next weight, if it is there and was packed from ``form``."""
        ...

    def keep(self, form: str, pieces: Sequence[np.ndarray]) -> None:
        """Note the bytes of the next weight, which had to be packed."""
        ...


class Ops(Protocol):
    """One implementation of all operators."""

    name: str

    @property
    def sampling(self) -> SamplingKernels:
        """Work on single rows of logits."""
        ...

    def set_packed_store(self, store: PackedStore | None) -> None:
        """Where `pack_weight` finds and leaves packed bytes; an implementation whose packing is free ignores it."""
        ...

    def pack_weight(self, parts: Sequence[RawTensor], role: WeightRole) -> Weight:
        """Pack 2-D file tensors joined by rows (q, k, v; gate, up) into one matrix; parts may differ in format.

        ``gate_up`` takes exactly two parts of equal shape. A ``head`` may be used as an ``embedding`` too (tied).
        """
        ...

    def embedding(self, ids: torch.Tensor, table: Weight, scale: float = 1.0) -> torch.Tensor:
        """Rows ``ids`` (int32 ``[T]``) of the table, times ``scale``: ``[T, H]``."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight`` per row; ``weight`` is float32 ``[H]`` with any offset already added."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rms_norm(x + residual), x + residual)``; may reuse the memory of both inputs."""
        ...

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x + y``; may reuse the memory of ``x``."""
        ...

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: ``[T, out_features]``."""
        ...

    def gated_linear(self, x: torch.Tensor, gate_up: Weight, activation: Activation) -> torch.Tensor:
        """``act(x @ gate.T) * (x @ up.T)``: ``[T, out_features / 2]``."""
        ...

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
        """Norm (if given) and rotate q and k, write k and v to their slots, return q ``[T, heads * head_dim]``.

        ``qk_norm`` is float32 weights of q and of k, and eps. Weights of ``head_dim`` values norm each head by itself;
        weights as long as all heads together norm the whole row of q (of k) at once.
        ``qkv`` is ``[T, (heads + 2 * kv_heads) * head_dim]``, overwritten. ``cos_sin`` is float32
        ``[max_position, rotary_dim]``, cosines first; pairs are (i, i + rotary_dim / 2). Slots of -1 write nothing.
        """
        ...

    def attention(
        self, q: torch.Tensor, shape: AttentionShape, meta: AttentionMetadata, cache: LayerCache
    ) -> torch.Tensor:
        """Causal attention of each request's new tokens over its blocks: ``[T, heads * head_dim]``."""
        ...

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``x[rows]`` (int32 ``[R']``): the rows that need logits."""
        ...

    def logits(self, x: torch.Tensor, head: Weight, softcap: float = 0.0) -> torch.Tensor:
        """Raw float32 logits ``[R', V]``, soft-capped when ``softcap`` > 0."""
        ...

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
        """Top-k mixture of experts, combined in top-k order: ``[T, H]``."""
        ...

    def make_step_inputs(self, memory: StepMemory) -> StepInputs:
        """What fills the buffers of ``memory``."""
        ...
