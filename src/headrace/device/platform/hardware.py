"""What this machine offers to this process: cores, memory, instruction set. Imports no PyTorch.

Owns the reading of ``/proc`` and of both versions of control groups. A limit counts wherever in the chain of groups it
is set; what cannot be read does not limit.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from headrace.config import env
from headrace.config.hardware import HardwareInfo

NATIVE_MODULE = "headrace.device.ops.cpu._native"

# From the best to the least; each needs all flags of /proc/cpuinfo beside it.
_ISAS = (
    ("avx512_bf16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}),
    ("avx512_vnni", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2", {"avx2", "fma", "f16c"}),
)


def detect_hardware(root: Path = Path("/"), num_allowed: int | None = None) -> HardwareInfo:
    """Measure the machine.

    Args:
        root: folder that holds ``proc`` and ``sys``.
        num_allowed: cores that the affinity mask allows; asked of the system when ``None``.
    """
    if num_allowed is None:
        num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total, available = _read_meminfo(root)
    for limit, used in _memory_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    native = find_spec(NATIVE_MODULE) is not None
    return HardwareInfo(
        platform="cpu",
        num_cores=max(1, min([num_allowed, *(int(quota) for quota in _cpu_quotas(root))])),
        total_memory_bytes=total,
        available_memory_bytes=available,
        isa=env.forced_isa() or _best_isa(root) if native else "",
        native_ops=native,
    )


def _best_isa(root: Path) -> str:
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    flags: set[str] = set()
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
            break
    return next((name for name, needed in _ISAS if needed <= flags), "generic")


def _read_meminfo(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    values: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[key] = int(number[0]) * 1024
    if "MemTotal" not in values:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size, pages * size
    return values["MemTotal"], values.get("MemAvailable", values["MemTotal"])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups for a controller, innermost first.

    A container often sees its own group mounted as the root, so the chain ends at the mount itself in every case.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, inner = rest.partition(":")
        if controllers == "":
            base = mount
        elif controller in controllers.split(","):
            base = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        folder = base / inner.strip("/")
        while True:
            yield folder
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores that each group may use at once."""
    for group in _groups(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit of each group and what of it is in use, without the file pages that the system can take back."""
    for group in _groups(root, "memory"):
        for limit_name, used_name, cache_key in (
            ("memory.max", "memory.current", "file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
        ):
            limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines() if " " in line)
                yield int(limit), max(0, int(used) - int(stat.get(cache_key, "0")))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
