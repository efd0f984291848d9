"""Operator implementations by name.

`config.resolve` decides the name and its reason; here it becomes an object. A factory imports its implementation only
when it is called, so that listing names costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.base.errors import ConfigError
from headrace.base.registry import Registry
from headrace.config import env
from headrace.config.sections import EngineConfig
from headrace.device.ops.interface import Ops

OPS: Registry[Callable[[EngineConfig], Ops]] = Registry("operators")


@OPS.register("reference")
def _make_reference(config: EngineConfig) -> Ops:
    from headrace.device.ops.reference.ops import ReferenceOps

    if config.model.quantization is not None:
        raise ConfigError("--quantization needs the native operators; the reference ones compute in floats")
    return ReferenceOps(torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32)


@OPS.register("native")
def _make_native(config: EngineConfig) -> Ops:
    try:
        from headrace.device.ops.cpu.ops import NativeOps
    except ImportError as error:
        raise ConfigError(f"--ops native: the kernels are not built here ({error}); use --ops reference") from None

    model = config.model
    return NativeOps(
        config.parallel.num_threads,
        "exact" if model.activations == "exact" else "int8",
        env.forced_isa(),
        model.quantization,
    )


def make_ops(config: EngineConfig) -> Ops:
    """Make the operators that the configuration names.

    Raises:
        ConfigError: there are none of that name, or they cannot do what is asked.
    """
    name = config.device.ops
    if name not in OPS:
        raise ConfigError(f"--ops {name}: not available here; available: {', '.join(OPS)}")
    return OPS.get(name)(config)
