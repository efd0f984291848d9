"""Attention backends by name, in order of preference.

An entry is a factory that takes the operators in use, so that a backend's packages are imported only when it is made.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.registry import Registry
from headrace.device.attention.backend import AttentionBackend
from headrace.device.attention.backends.cpu_native import CpuNativeBackend
from headrace.device.attention.backends.reference import ReferenceBackend
from headrace.device.ops.interface import Ops

BackendFactory = Callable[[Ops], AttentionBackend]

ATTENTION_BACKENDS: Registry[BackendFactory] = Registry("attention backend")
ATTENTION_BACKENDS.register("cpu_native")(CpuNativeBackend)
ATTENTION_BACKENDS.register("reference")(ReferenceBackend)


def make_backends(ops: Ops) -> list[AttentionBackend]:
    """Every known backend over ``ops``, the preferred one first."""
    return [ATTENTION_BACKENDS.get(name)(ops) for name in ATTENTION_BACKENDS]
