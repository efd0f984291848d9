"""From what the user set, what the machine is and what the model says to final values, each with its reason.

Pure: hardware and architecture come in as records. Nothing downstream asks ``auto`` or treats 0 as "choose": a decision
is made here once, and `headrace explain-config` prints why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.base.errors import ConfigError
from headrace.config.architecture import Architecture
from headrace.config.hardware import HardwareInfo
from headrace.config.sections import (
    CacheSection,
    DeviceSection,
    EngineConfig,
    LimitsSection,
    ModelSection,
    ObservabilitySection,
    ParallelSection,
    SchedulerSection,
)
from headrace.config.units import parse_size

SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "cache": CacheSection,
    "scheduler": SchedulerSection,
    "parallel": ParallelSection,
    "device": DeviceSection,
    "observability": ObservabilitySection,
    "limits": LimitsSection,
}
CPU_TOKEN_GAP_FACTOR = 1.4
PACKED_CACHE_BYTES = 8 << 30
FLOAT_FORMATS = frozenset({"F32", "F16", "BF16"})


def flag_name(field: Field[Any]) -> str:
    """``--max-model-len`` for ``max_model_len``, unless the field names its own flag."""
    return "--" + field.metadata.get("flag", field.name.replace("_", "-"))


def section_of(name: str) -> str:
    """The section that a setting belongs to; raises `ConfigError` that names near ones."""
    for section, kind in SECTIONS.items():
        if any(f.name == name for f in fields(kind)):
            return section
    from difflib import get_close_matches

    known = [f.name for kind in SECTIONS.values() for f in fields(kind)]
    near = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"unknown setting '{name}'{hint}")


def type_of(hints: Mapping[str, Any], field: Field[Any]) -> tuple[Any, bool]:
    """The type of a setting beside ``None``, and whether it may be ``None``."""
    hint = hints[field.name]
    # A literal or nothing is a union of the older kind.
    if get_origin(hint) not in (UnionType, Union):
        return hint, False
    (inner,) = (arm for arm in get_args(hint) if arm is not NoneType)
    return inner, True


def _checked(kind: type, name: str, value: Any) -> Any:
    """A setting as its section wants it: sizes may be written with units; raises `ConfigError` for another type."""
    field = next(f for f in fields(kind) if f.name == name)
    wanted, optional = type_of(get_type_hints(kind), field)
    flag = flag_name(field)
    if value is None and optional:
        return None
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ConfigError(f"{flag} must be one of {', '.join(map(str, get_args(wanted)))}")
        return value
    if isinstance(value, str) and field.metadata.get("unit") == "bytes":
        return parse_size(value)
    if isinstance(value, PurePath) and wanted is str:
        return str(value)
    if wanted is float and type(value) is int:
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        named = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[wanted]
        raise ConfigError(f"{flag} must be {named}")
    return value


class _Resolver:
    """Collects decided values and reasons, section by section."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        grouped: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for name, value in settings.items():
            section = section_of(name)
            grouped[section][name] = _checked(SECTIONS[section], name, value)
            self.reasons[f"{section}.{name}"] = "set by the user"
        for section, kind in SECTIONS.items():
            self.values[section] = kind(**grouped[section])
            for field in fields(kind):
                self.reasons.setdefault(f"{section}.{field.name}", "default")

    def get(self, path: str) -> Any:
        section, name = path.split(".")
        return getattr(self.values[section], name)

    def decide(self, path: str, value: Any, reason: str) -> None:
        """Set a value that the user left open."""
        section, name = path.split(".")
        self.values[section] = replace(self.values[section], **{name: value})
        self.reasons[path] = reason


def resolve(
    settings: Mapping[str, Any], hardware: HardwareInfo, architecture: Architecture, model_path: str
) -> EngineConfig:
    """Return the final configuration.

    Args:
        settings: what the user set, by field name; absent means open. Sizes are bytes.
        hardware: the machine.
        architecture: the model.
        model_path: file or folder of the model.

    Raises:
        ConfigError: a value out of range or a combination that cannot work, with the remedy.
    """
    r = _Resolver(settings)
    _check(r)
    _check_limits(r)
    _resolve_device(r, hardware)
    _resolve_graphs(r)
    _resolve_model(r, architecture)
    _resolve_name(r, model_path)
    _resolve_cache(r)
    _resolve_scheduler(r, hardware)
    return EngineConfig(**r.values, architecture=architecture, model_path=model_path, reasons=r.reasons)


def _check(r: _Resolver) -> None:
    """Refuse values that no machine can serve; messages name the flag."""
    at_least = {
        "cache.block_size": 0,
        "cache.kv_cache_memory": 0,
        "scheduler.max_num_seqs": 0,
        "scheduler.max_num_batched_tokens": 0,
        "scheduler.long_prefill_token_threshold": 0,
        "scheduler.pipeline_depth": 1,
        "scheduler.max_head_bypass_steps": 0,
        "parallel.num_threads": 0,
        "parallel.tensor_parallel_size": 1,
        "parallel.pipeline_parallel_size": 1,
        "observability.max_logprobs": -1,
    }
    optional = (
        "model.max_model_len",
        "cache.num_kv_blocks",
        "scheduler.max_num_scheduled_tokens",
        "scheduler.max_num_queued_reqs",
        "scheduler.max_num_queued_tokens",
    )
    at_least |= {path: 1 for path in optional if r.get(path) is not None}
    if r.get("model.packed_cache") is not None:
        at_least["model.packed_cache"] = 0
    for path, low in at_least.items():
        if r.get(path) < low:
            raise ConfigError(f"--{path.split('.')[1].replace('_', '-')} must be an integer of at least {low}")
    if not 0.0 < r.get("cache.kv_cache_share") < 1.0:
        raise ConfigError("--kv-cache-share must lie between 0 and 1")
    if not 0.0 <= r.get("scheduler.watermark") < 0.5:
        raise ConfigError("--watermark must be at least 0 and below 0.5")
    for path in ("scheduler.max_token_gap_ms", "observability.stats_interval_s"):
        if not 0.0 <= r.get(path) < float("inf"):
            raise ConfigError(f"--{path.split('.')[1].replace('_', '-')} must be at least 0")
    factor = r.get("scheduler.max_token_gap_factor")
    if factor and not 1.0 < factor < float("inf"):
        raise ConfigError("--max-token-gap-factor must be above 1, or 0 for no limit")


def _check_limits(r: _Resolver) -> None:
    for one in fields(LimitsSection):
        value, flag = r.get(f"limits.{one.name}"), f"--{one.name.replace('_', '-')}"
        if isinstance(one.default, float):
            if not 0.0 < value < float("inf"):
                raise ConfigError(f"{flag} must be above 0")
            continue
        most = one.metadata.get("most", (1 << 63) - 1)
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} must be an integer from 1 to {most}")


def _resolve_device(r: _Resolver, hardware: HardwareInfo) -> None:
    if r.get("device.platform") == "auto":
        r.decide("device.platform", hardware.platform, f"the machine offers {hardware.platform}")
    if r.get("device.ops") == "auto":
        if r.get("device.platform") == "cuda":
            r.decide("device.ops", "triton", "CUDA runs Triton kernels")
        elif hardware.native_ops:
            r.decide("device.ops", "native", f"native kernels are built; this CPU runs the {hardware.isa} ones")
        else:
            r.decide("device.ops", "reference", "no native kernels: install with a C++ compiler to get them")
    elif r.get("device.ops") == "native" and not hardware.native_ops:
        raise ConfigError("--ops native: the native kernels are not built; reinstall where g++ exists")
    if r.get("parallel.num_threads") == 0:
        r.decide("parallel.num_threads", hardware.num_cores, "cores that affinity and cgroup quota allow")
    ranks = r.get("parallel.tensor_parallel_size") * r.get("parallel.pipeline_parallel_size")
    if r.get("parallel.executor") == "auto":
        kind = "uniproc" if ranks == 1 else "multiproc"
        r.decide("parallel.executor", kind, f"{ranks} worker{'s' if ranks > 1 else ''} on one machine")
    elif r.get("parallel.executor") == "uniproc" and ranks > 1:
        raise ConfigError(f"--executor uniproc runs one worker, not {ranks}; leave it out, or take multiproc")


def _resolve_graphs(r: _Resolver) -> None:
    """Whether forwards are captured. What capture then gives, the running engine tells."""
    ops, asked = r.get("device.ops"), r.get("device.enforce_eager")
    if asked:
        why = "set by the user: steps run EAGER"
    elif ops != "native":
        why = f"the {ops} operators are called one by one: steps run EAGER"
    elif r.get("parallel.tensor_parallel_size") > 1:
        why = "no plan holds the sums over ranks between operators: steps run EAGER"
    else:
        why = "the native operators become one captured plan: FULL, or PIECEWISE around operators of PyTorch"
    r.decide("device.enforce_eager", bool(asked) or ops != "native", why)


def _resolve_model(r: _Resolver, architecture: Architecture) -> None:
    asked = r.get("model.dtype")
    if asked == "auto":
        if r.get("device.platform") == "cpu":
            r.decide("model.dtype", "float32", "CPU kernels accumulate in float32")
        else:
            r.decide("model.dtype", architecture.dtype, "as the model file says")
    quantized = architecture.weight_format not in FLOAT_FORMATS or r.get("model.quantization") is not None
    if r.get("model.activations") == "auto":
        if asked == "float32":
            r.decide("model.activations", "exact", "--dtype float32 asks for exact numbers throughout")
        elif r.get("device.ops") == "native" and quantized:
            r.decide("model.activations", "int8", f"weights are quantised ({architecture.weight_format})")
        elif quantized:
            r.decide("model.activations", "exact", f"the {r.get('device.ops')} ops compute in floats")
        else:
            r.decide("model.activations", "exact", "weights are floats")
    elif r.get("model.activations") == "int8" and r.get("device.ops") != "native":
        raise ConfigError("--cpu-activations int8 needs the native CPU kernels")
    if r.get("device.ops") != "native":
        r.decide("model.packed_cache", 0, f"the {r.get('device.ops')} ops pack nothing")
    elif r.get("model.packed_cache") is None:
        r.decide("model.packed_cache", PACKED_CACHE_BYTES, "a later start maps what an earlier one packed")
    if r.get("model.max_model_len") is None:
        r.decide("model.max_model_len", architecture.max_position, "the model's own context")
    elif r.get("model.max_model_len") > architecture.max_position:
        asked_len, context = r.get("model.max_model_len"), architecture.max_position
        raise ConfigError(f"--max-model-len {asked_len} is above the model's context of {context}")


def _resolve_name(r: _Resolver, model_path: str) -> None:
    """What clients call the model: never a path, which is the machine's own affair."""
    if r.get("model.served_model_name") is not None:
        return
    model = r.get("model.model")
    # A name is looked up, and found somewhere else; a path is its own place.
    if Path(model).expanduser() == Path(model_path).expanduser():
        name = Path(model_path).name.removesuffix(".gguf") or Path(model_path).absolute().name or "model"
        r.decide("model.served_model_name", name, "the name of the model's file or folder")
    else:
        r.decide("model.served_model_name", model, "the model argument")


def _resolve_cache(r: _Resolver) -> None:
    cpu = r.get("device.platform") == "cpu"
    if r.get("cache.block_size") == 0:
        r.decide("cache.block_size", 32 if cpu else 16, "measured best on CPU" if cpu else "the field's default")
    if r.get("cache.kv_cache_dtype") == "auto":
        if r.get("model.activations") == "exact":
            why = "exact activations keep exact keys and values"
            r.decide("cache.kv_cache_dtype", "float32" if cpu else "float16", why)
        else:
            r.decide("cache.kv_cache_dtype", "float16", "half the traffic of float32 at no visible loss")


def _resolve_scheduler(r: _Resolver, hardware: HardwareInfo) -> None:
    cpu = r.get("device.platform") == "cpu"
    max_len = r.get("model.max_model_len")
    if r.get("scheduler.max_num_seqs") == 0:
        r.decide("scheduler.max_num_seqs", 128 if cpu else 256, f"enough to fill {hardware.platform} steps")
    if r.get("scheduler.max_num_batched_tokens") == 0:
        tokens = max(2048 if not cpu else 1024, r.get("scheduler.max_num_seqs"))
        r.decide("scheduler.max_num_batched_tokens", tokens, "products no longer gain from longer steps")
    batched, seqs = r.get("scheduler.max_num_batched_tokens"), r.get("scheduler.max_num_seqs")
    if batched < seqs:
        if r.reasons["scheduler.max_num_seqs"] == "set by the user":
            raise ConfigError(f"--max-num-batched-tokens {batched} must be at least --max-num-seqs {seqs}")
        r.decide("scheduler.max_num_seqs", batched, "no more than one token each fits a step")
    if r.get("scheduler.max_num_scheduled_tokens") is None:
        r.decide("scheduler.max_num_scheduled_tokens", batched, "equal to max_num_batched_tokens")
    elif r.get("scheduler.max_num_scheduled_tokens") > batched:
        raise ConfigError(f"--max-num-scheduled-tokens must be at most --max-num-batched-tokens {batched}")
    if r.get("scheduler.long_prefill_token_threshold") > max_len:
        raise ConfigError(f"--long-prefill-token-threshold must be at most the context of {max_len}")
    _resolve_token_gap(r, cpu)


def _resolve_token_gap(r: _Resolver, cpu: bool) -> None:
    if r.get("scheduler.max_token_gap_factor") is not None:
        return
    if r.get("scheduler.max_token_gap_ms") > 0.0:
        r.decide("scheduler.max_token_gap_factor", 0.0, "--max-token-gap-ms says what is wanted")
    elif cpu:
        why = "a long prompt takes a CPU seconds; streams go on at 70 % of their pace meanwhile"
        r.decide("scheduler.max_token_gap_factor", CPU_TOKEN_GAP_FACTOR, why)
    else:
        r.decide("scheduler.max_token_gap_factor", 0.0, "prompts pass quickly on this device")
