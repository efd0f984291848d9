"""The CPU as a platform: where tensors live, and who owns the cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.config.sections import EngineConfig


@dataclass(frozen=True, slots=True)
class CpuPlatform:
    """One process on a CPU.

    Attributes:
        dtype: type of activations.
        torch_threads: threads of PyTorch's pool; one when native kernels own the cores, so that the pools do not fight.
    """

    dtype: torch.dtype
    torch_threads: int
    name: str = "cpu"

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return torch.device("cpu")

    @classmethod
    def from_config(cls, config: EngineConfig) -> CpuPlatform:
        """What the configuration asks for."""
        reference = config.device.ops == "reference"
        dtype = torch.bfloat16 if reference and config.model.dtype == "bfloat16" else torch.float32
        return cls(dtype=dtype, torch_threads=config.parallel.num_threads if reference else 1)

    def apply_threads(self) -> None:
        """Size PyTorch's pool in this process."""
        torch.set_num_threads(self.torch_threads)
