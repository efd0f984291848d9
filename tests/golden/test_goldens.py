"""Exact numbers reproduce the reference: prompt ids, greedy continuations and log-probabilities of the real model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.device.platform.hardware import detect_hardware

TOLERANCE = 1e-3
MAX_LEN = 2048


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first differing token, or the common length."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def check_continuation(golden: dict[str, Any], output: RequestOutput) -> None:
    """Tokens are equal up to a near tie; log-probabilities of the chosen and the best tokens agree up to there."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    same = first_difference(answer.token_ids, golden["output_ids"])
    whole = answer.token_ids == golden["output_ids"]
    assert whole or same in golden["near_ties"], (golden["id"], same)
    if whole:
        assert answer.finish_reason == golden["finish"]
    for i in range(same):
        position = answer.logprobs[i]
        assert abs(position[golden["output_ids"][i]].logprob - golden["logprobs"][i]) < TOLERANCE, (golden["id"], i)
        for token_id, logprob in golden["top5"][i]:
            if token_id in position:
                assert abs(position[token_id].logprob - logprob) < TOLERANCE, (golden["id"], i, token_id)


def check_prompt_logprobs(golden: dict[str, Any], output: RequestOutput) -> None:
    """The first position has none; all others agree."""
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(golden["prompt_ids"])
    assert entries[0] is None
    for i in range(1, len(entries)):
        entry = entries[i]
        assert entry is not None
        assert abs(entry[golden["prompt_ids"][i]].logprob - golden["prompt_logprobs"][i]) < TOLERANCE, i


def run_goldens(gguf: Path, goldens: list[dict[str, Any]], **settings: Any) -> None:
    """All given prompts in one batch, from text where the golden has it."""
    with LLM(str(gguf), dtype="float32", max_model_len=MAX_LEN, **settings) as llm:
        tokenizer = llm.get_tokenizer()
        for golden in goldens:
            assert tokenizer.encode(golden["text_prompt"], add_special_tokens=False) == golden["prompt_ids"], golden[
                "id"
            ]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=64,
                logprobs=5,
                prompt_logprobs=1 if golden.get("prompt_logprobs") else None,
            )
            for golden in goldens
        ]
        prompts = [{"prompt_token_ids": golden["prompt_ids"]} for golden in goldens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for golden, output in zip(goldens, outputs, strict=True):
            check_continuation(golden, output)
            if golden.get("prompt_logprobs"):
                check_prompt_logprobs(golden, output)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not detect_hardware().native_ops, reason="the native kernels are not built")
def test_native_ops_reproduce_every_golden(smollm2_gguf: Path, goldens: list[dict[str, Any]]) -> None:
    run_goldens(smollm2_gguf, goldens, ops="native")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reference_ops_reproduce_goldens(smollm2_gguf: Path, goldens: list[dict[str, Any]]) -> None:
    short = [golden for golden in goldens if len(golden["prompt_ids"]) < 48 and golden["output_ids"]][::4]
    run_goldens(smollm2_gguf, short, ops="reference")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_reference_ops_reproduce_every_golden(smollm2_gguf: Path, goldens: list[dict[str, Any]]) -> None:
    run_goldens(smollm2_gguf, goldens, ops="reference")
