"""The kernels without Python: under sanitizers, and for ARM under emulation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def _build(name: str, *options: str) -> Path:
    """Configure and build the kernel test; the folder stays, so that a second run compiles what has changed."""
    folder = ROOT / "build" / f"kernel-test-{name}"
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    assert cmake is not None, "CMake is part of the test environment"
    settings = ["-DHEADRACE_KERNEL_TESTS=ON", *options]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(folder), *settings], check=True, timeout=120)
    subprocess.run([cmake, "--build", str(folder), "--parallel", "2"], check=True, timeout=3000)
    return folder / "kernel_test"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all fine" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels_under_sanitizers(sanitizers) -> None:
    _run(str(_build(sanitizers.replace(",", "-"), f"-DHEADRACE_SANITIZE={sanitizers}")))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)),
    reason=f"{ARM_COMPILER} or {ARM_EMULATOR} is missing",
)
def test_the_arm_unit_under_emulation() -> None:
    target = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static")
    _run(ARM_EMULATOR, str(_build("arm", f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}", *target)))
