"""Fixtures shared by all rooms."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("HEADRACE_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file, fetched once into the cache."""
    from headrace.model_files.download import fetch_model

    return Path(fetch_model("smollm2-135m"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of reference data beside the checkout."""
    if not SHARED.is_dir():
        pytest.fail(f"{SHARED} is missing; set HEADRACE_SHARED to the folder with golden/ and conformance/")
    return SHARED


@pytest.fixture(scope="session")
def goldens(shared_dir: Path) -> list[dict[str, Any]]:
    """Reference prompts with ids, continuations and log-probabilities."""
    return json.loads((shared_dir / "golden" / "golden_given.json").read_text())["prompts"]
