"""The gated MLP of every family here."""

from __future__ import annotations

import torch

from headrace.device.distributed.groups import Group
from headrace.device.layers.linear import GateUpLinear, RowParallelLinear
from headrace.device.loading.weights import WeightReader
from headrace.device.ops.interface import Activation, Ops


class GatedMLP:
    """``down(act(gate(x)) * up(x))``."""

    def __init__(
        self, ops: Ops, prefix: str, hidden_size: int, intermediate_size: int, activation: Activation, group: Group
    ) -> None:
        self.gate_up = GateUpLinear(ops, prefix, hidden_size, intermediate_size, activation, group)
        self.down = RowParallelLinear(ops, f"{prefix}.down", intermediate_size, hidden_size, False, group)

    def load(self, weights: WeightReader) -> None:
        """Take the weights."""
        self.gate_up.load(weights)
        self.down.load(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        return self.down.forward(self.gate_up.forward(x))
