"""Matrices, tensor-parallel by construction.

Each layer takes its rank's share of rows or columns when it loads and keeps only the packed weight. Column-parallel
layers leave their result split over ranks; the row-parallel one that follows sums it up again. With one rank all shares
are whole.
"""

from __future__ import annotations

import torch

from headrace.base.errors import ConfigError
from headrace.device.distributed.groups import Group
from headrace.device.loading.weights import WeightReader
from headrace.device.ops.interface import Activation, Ops, Weight


def check_divides(what: str, count: int, group: Group) -> None:
    """Raise `ConfigError` unless the ranks can share ``count`` equally."""
    if count % group.size:
        raise ConfigError(f"{what} ({count}) cannot be shared by {group.size} tensor-parallel ranks")


class QKVLinear:
    """Queries, keys and values in one product: ``[T, (heads + 2 kv_heads) * head_dim]`` of this rank's heads.

    The slots are ``<prefix>.q``, ``.k``, ``.v`` and, with ``bias``, ``.q_bias``, ``.k_bias``, ``.v_bias``.
    """

    weight: Weight

    def __init__(
        self,
        ops: Ops,
        prefix: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        group: Group,
    ) -> None:
        check_divides("attention heads", num_heads, group)
        check_divides("key-value heads", num_kv_heads, group)
        self._ops = ops
        self._prefix = prefix
        self._hidden_size = hidden_size
        self._head_dim = head_dim
        self._parts = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self._has_bias = bias
        self._group = group
        self.bias: torch.Tensor | None = None

    def load(self, weights: WeightReader) -> None:
        """Take and pack this rank's heads."""
        raws, biases, first_row, total = [], [], 0, sum(self._parts.values())
        for part, rows in self._parts.items():
            slot, share, part_of = f"{self._prefix}.{part}", self._group.share(rows), (first_row, total)
            raw = weights.matrix(slot, rows, self._hidden_size, head_dim=self._head_dim, part_of=part_of)
            raws.append(raw.take_rows(share))
            if self._has_bias:
                bias = weights.vector(f"{slot}_bias", rows, head_dim=self._head_dim, part_of=part_of)
                biases.append(bias[share])
            first_row += rows
        self.weight = self._ops.pack_weight(raws, "linear")
        self.bias = torch.cat(biases) if biases else None
        weights.done(*raws)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, (heads + 2 kv_heads) * head_dim]``."""
        return self._ops.linear(x, self.weight, self.bias)


class GateUpLinear:
    """The first half of a gated MLP: ``act(x @ gate) * (x @ up)``, ``[T, intermediate]`` of this rank."""

    weight: Weight

    def __init__(
        self, ops: Ops, prefix: str, hidden_size: int, intermediate_size: int, activation: Activation, group: Group
    ) -> None:
        check_divides("MLP width", intermediate_size, group)
        self._ops = ops
        self._prefix = prefix
        self._hidden_size = hidden_size
        self._intermediate_size = intermediate_size
        self._activation = activation
        self._group = group

    def load(self, weights: WeightReader) -> None:
        """Take and pack this rank's columns of the MLP."""
        rows, share = self._intermediate_size, self._group.share(self._intermediate_size)
        raws = [
            weights.matrix(f"{self._prefix}.{part}", rows, self._hidden_size, part_of=(first, 2 * rows)).take_rows(
                share
            )
            for part, first in (("gate", 0), ("up", rows))
        ]
        self.weight = self._ops.pack_weight(raws, "gate_up")
        weights.done(*raws)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, intermediate]``."""
        return self._ops.gated_linear(x, self.weight, self._activation)


class RowParallelLinear:
    """A matrix whose input is split over ranks; the ranks' results are summed."""

    weight: Weight

    def __init__(self, ops: Ops, slot: str, in_features: int, out_features: int, bias: bool, group: Group) -> None:
        check_divides(f"{slot} input", in_features, group)
        self._ops = ops
        self._slot = slot
        self._in_features = in_features
        self._out_features = out_features
        self._has_bias = bias
        self._group = group
        self.bias: torch.Tensor | None = None

    def load(self, weights: WeightReader) -> None:
        """Take and pack this rank's columns; the bias belongs to the first rank, so that it is added once."""
        raw = weights.matrix(self._slot, self._out_features, self._in_features)
        if self._group.size > 1:
            share = self._group.share(self._in_features)
            raw = raw.take_cols(share.start, share.stop)
        if self._has_bias:
            bias = weights.vector(f"{self._slot}_bias", self._out_features)
            self.bias = bias if self._group.rank == 0 else None
        self.weight = self._ops.pack_weight([raw], "linear")
        weights.done(raw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, out]``, complete on every rank."""
        return self._group.all_reduce(self._ops.linear(x, self.weight, self.bias))
