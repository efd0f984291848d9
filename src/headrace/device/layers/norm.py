"""RMS norms with their weights."""

from __future__ import annotations

import torch

from headrace.device.loading.weights import WeightReader
from headrace.device.ops.interface import Ops


class RMSNorm:
    """``x / rms(x) * weight``; the weight is float32 with the family's offset added at load."""

    def __init__(self, ops: Ops, slot: str, size: int, eps: float) -> None:
        self._ops = ops
        self._slot = slot
        self._size = size
        self.eps = eps
        self.weight = torch.empty(0)

    def load(self, weights: WeightReader) -> None:
        """Take the weights."""
        self.weight = weights.norm(self._slot, self._size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise rows."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add_forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; both inputs may be overwritten."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
