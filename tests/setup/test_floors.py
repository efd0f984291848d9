"""What the server process loads, and that every dependency is accounted for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [
    "headrace.model_files.download",
    "headrace.model_files.tokenizer",
    "headrace.model_files.architecture",
    "headrace.model_files.checkpoint",
]


@pytest.mark.parametrize("module", ROOMS)
def test_model_files_load_neither_torch_nor_the_hub(module: str) -> None:
    code = (
        f"import sys, {module}; print(*[m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_each_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (ROOT / "docs" / "adr" / "0002-dependencies.md").read_text()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [requirement for group in groups for requirement in group]
    names = {re.split(r"[<>=!;\[ ]", requirement)[0] for requirement in requirements}
    missing = sorted(name for name in names if f"`{name}`" not in reasons)
    assert missing == []


def test_versions_agree() -> None:
    """The version of PyTorch that is installed first satisfies the package's own requirement."""
    text = (ROOT / "tools" / "bootstrap.py").read_text()
    pinned = re.search(r'^TORCH = "torch==(\d+)\.(\d+)', text, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(re.search(r"torch>=(\d+)\.(\d+)", r) for r in project["dependencies"] if r.startswith("torch"))
    assert pinned is not None and wanted is not None
    assert [int(n) for n in pinned.groups()] >= [int(n) for n in wanted.groups()]
