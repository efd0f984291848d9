"""Weights mapped as an earlier start packed them give the same tokens and logprobs as fresh ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("headrace.device.ops.cpu._native", reason="the native kernels are not built")


@pytest.mark.slow
def test_the_second_start_says_the_same(
    smollm2_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace

    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)
    params = headrace.SamplingParams(max_tokens=24, temperature=0.8, seed=5, logprobs=2)

    def answer(packed_cache: int) -> list[object]:
        llm = headrace.LLM(str(smollm2_gguf), max_model_len=256, num_kv_blocks=64, packed_cache=packed_cache)
        with llm:
            (output,) = llm.generate(["The capital of France is"], params)
        return [output.outputs[0].token_ids, output.outputs[0].logprobs]

    never, first = answer(0), answer(1 << 30)
    (kept,) = (file for file in (tmp_path / "packed").iterdir() if not file.name.startswith("."))
    with caplog.at_level(logging.INFO):
        second = answer(1 << 30)
    assert f"from {kept}" in caplog.text
    assert never == first == second
