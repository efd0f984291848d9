"""What the machine is, as a record: measured elsewhere (``device.platform``), decided upon here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """The machine as far as configuration depends on it.

    ``num_cores`` respects affinity and cgroup quota; ``available_memory_bytes`` respects the cgroup's limit.
    ``isa`` is the best instruction set that native kernels may use (``avx2``, ``avx512``, ``avx512_vnni``,
    ``avx512_bf16``, ``neon``, or ``""`` without native kernels).
    """

    platform: str
    num_cores: int
    total_memory_bytes: int
    available_memory_bytes: int
    isa: str = ""
    native_ops: bool = False
