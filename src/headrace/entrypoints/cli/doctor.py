"""``headrace doctor``.

examples:
  headrace doctor
  headrace doctor --json

Looks, changes nothing. The exit status is 1 when something will not work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headrace.config import env
from headrace.config.hardware import HardwareInfo
from headrace.config.units import format_size

PACKAGES = ("torch", "numpy", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn", "jinja2", "llguidance")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LOW_MEMORY_BYTES = 1 << 30
LOW_DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to mend. ``fatal``: headrace will not work until it is."""

    what: str
    remedy: str
    fatal: bool = False


def cpu_caches(folder: Path = CACHES) -> dict[str, str]:
    """Sizes of the first core's caches by level and kind."""
    found = {}
    for entry in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((entry / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        found[f"L{level} {kind.lower()}"] = size
    return found


def versions() -> dict[str, str | None]:
    """Installed packages; ``None`` where one is missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def find_problems(hardware: HardwareInfo, packages: dict[str, str | None], free_disk_bytes: int) -> list[Problem]:
    """What stands in the way, worst first."""
    problems = [
        Problem(f"{name} is not installed", f"pip install {name}", fatal=True)
        for name, version in packages.items()
        if version is None
    ]
    if not hardware.native_ops and hardware.platform == "cpu":
        remedy = "install a C++ compiler (Debian: apt-get install g++) and install headrace again"
        problems.append(Problem("the native CPU kernels are not built, so answers are slow", remedy))
    if hardware.available_memory_bytes < LOW_MEMORY_BYTES:
        free = format_size(hardware.available_memory_bytes)
        problems.append(Problem(f"only {free} of memory are free", "end other programs, or give --kv-cache-memory"))
    if free_disk_bytes < LOW_DISK_BYTES:
        what = f"only {format_size(free_disk_bytes)} are free for models"
        problems.append(Problem(what, "make room, or set HEADRACE_HOME to a larger disk"))
    return problems


def _free_disk() -> int:
    folder = env.home()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print what the machine is and what is wrong with it."""
    from headrace.device.platform.hardware import detect_hardware

    hardware = detect_hardware()
    packages = versions()
    problems = find_problems(hardware, packages, _free_disk())
    facts = {
        "platform": hardware.platform,
        "machine": platform.machine(),
        "instruction set": env.forced_isa() or hardware.isa or "none (no native kernels)",
        "cores": f"{hardware.num_cores} usable of {os.cpu_count()}",
        **cpu_caches(),
        "memory": f"{format_size(hardware.available_memory_bytes)} free of {format_size(hardware.total_memory_bytes)}",
        "models": f"{env.home()} ({format_size(_free_disk())} free)",
        "python": platform.python_version(),
        **{name: version or "missing" for name, version in packages.items()},
    }
    if args.json:
        listed = [{"what": p.what, "remedy": p.remedy, "fatal": p.fatal} for p in problems]
        print(json.dumps({"facts": facts, "problems": listed}, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name:18}{value}")
        for problem in problems:
            print(f"\nproblem: {problem.what}\n  remedy: {problem.remedy}")
        if not problems:
            print("\nno problems found")
    sys.stdout.flush()
    return int(any(problem.fatal for problem in problems))
