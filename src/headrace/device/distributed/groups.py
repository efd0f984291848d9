"""Explicit process groups: who shares a layer, a pipeline, experts or requests.

A group is passed to the parts that communicate in it; nothing reads a global. In a group of one every collective
returns its argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist


class IntermediateTensors(NamedTuple):
    """What one pipeline stage hands to the next: ``[T, H]`` each. ``residual`` is still to be added to ``hidden``."""

    hidden: torch.Tensor
    residual: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate. ``handle`` is the library's group, ``None`` in a group of one."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; overwrites ``x``."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors joined along the last dimension, in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.handle)
        return torch.cat(parts, dim=-1)

    def share(self, total: int) -> slice:
        """This rank's part of ``total`` equal units, which the size must divide."""
        assert total % self.size == 0, (total, self.size)
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The groups that this rank is in: tensor, pipeline, expert and data parallel."""

    tp: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    ep: Group = field(default_factory=Group)
    dp: Group = field(default_factory=Group)

    def layer_range(self, num_layers: int) -> range:
        """The layers of this pipeline stage; earlier stages take one more when they do not divide evenly."""
        part, more = divmod(num_layers, self.pp.size)
        first = self.pp.rank * part + min(self.pp.rank, more)
        return range(first, first + part + (self.pp.rank < more))

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1
