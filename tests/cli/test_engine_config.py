"""What is said when the configuration is made."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config.hardware import HardwareInfo
from headrace.entrypoints import engine_config
from headrace.testing.engine_config import make_architecture

CPU = HardwareInfo("cpu", 2, 8 << 30, 8 << 30)


@pytest.mark.parametrize("native", [False, True])
def test_missing_kernels_are_told_at_start_with_the_remedy(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hardware = replace(CPU, native_ops=native, isa="avx2" if native else "")
    monkeypatch.setattr(engine_config, "detect_hardware", lambda: hardware)
    monkeypatch.setattr(engine_config, "read_architecture", lambda path: make_architecture())
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)
    (tmp_path / "model.gguf").write_bytes(b"")
    config = engine_config.load_engine_config({"model": str(tmp_path / "model.gguf")})
    assert config.device.ops == ("native" if native else "reference")
    assert ("install a C++ compiler" in caplog.text) is not native
