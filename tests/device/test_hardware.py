"""Cores and memory respect affinity and control groups of both versions, wherever in the chain a limit stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.device.platform.hardware import detect_hardware

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\n"


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    info = detect_hardware(write(tmp_path, {"proc/meminfo": MEMINFO}), num_allowed=6)
    assert (info.num_cores, info.total_memory_bytes, info.available_memory_bytes) == (6, 16 * GIB, 12 * GIB)


def test_version_2_limits_of_any_ancestor_count(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        "sys/fs/cgroup/outer/inner/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.stat": f"anon {GIB}\nfile {2 * GIB}\n",
        "sys/fs/cgroup/outer/memory.max": "max\n",
    }
    info = detect_hardware(write(tmp_path, files), num_allowed=8)
    assert (info.num_cores, info.total_memory_bytes, info.available_memory_bytes) == (2, 4 * GIB, 3 * GIB)


def test_version_1_limits_count(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"cache 0\ntotal_cache {GIB // 2}\n",
    }
    info = detect_hardware(write(tmp_path, files), num_allowed=8)
    assert (info.num_cores, info.available_memory_bytes) == (1, 3 * GIB // 2)


def test_affinity_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n", "proc/meminfo": MEMINFO}
    assert detect_hardware(write(tmp_path, files), num_allowed=3).num_cores == 3


def test_this_machine_can_be_measured_without_torch() -> None:
    code = (
        "import sys; from headrace.device.platform.hardware import detect_hardware as d; i = d();"
        "assert i.num_cores >= 1 and 0 < i.available_memory_bytes <= i.total_memory_bytes;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
