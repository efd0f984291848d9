"""A wheel holds the pages and all the code. Kernels are left out here: they are built in their own tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_pages_and_code_are_packed(tmp_path: Path) -> None:
    options = ["-C", "wheel.cmake=false", "-C", f"build-dir={tmp_path}/build"]
    words = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-build-isolation", "--no-deps", "-q"]
    subprocess.run([*words, "-w", str(tmp_path), *options], check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(ZipFile(wheel).namelist())
    static = ROOT / "src/headrace/entrypoints/dashboard/static"
    pages = {f"headrace/{path.relative_to(ROOT / 'src/headrace').as_posix()}" for path in static.iterdir()}
    assert {path.rpartition(".")[2] for path in pages} == {"html", "css", "js", "svg"}
    assert pages <= packed
    code = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/headrace").rglob("*.py")}
    assert code <= packed
    assert not [path for path in packed if "__pycache__" in path]
