"""The real default model against its goldens: prompt log-probabilities and the first greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.models import Driver

NUM_TOKENS = 8


@pytest.mark.slow
def test_first_tokens_of_the_goldens(smollm2_gguf: Path, goldens: list[dict[str, Any]]) -> None:
    driver = Driver.load(smollm2_gguf, max_model_len=2048, num_blocks=512)
    chosen = [p for p in goldens if len(p["prompt_ids"]) < 200 and p.get("prompt_logprobs")][:3]
    assert len(chosen) == 3
    for golden in chosen:
        ids, wanted = golden["prompt_ids"], golden["output_ids"][:NUM_TOKENS]
        request = driver.add(ids + wanted)
        logits = driver.step((request, len(ids)))
        logprobs = torch.log_softmax(logits, dim=-1)
        prompt = [logprobs[i, token].item() for i, token in enumerate(ids[1:])]
        assert prompt == pytest.approx(golden["prompt_logprobs"][1:], abs=1e-3)
        for position, token in enumerate(wanted):
            if position in golden["near_ties"]:
                break
            assert logits[-1].argmax().item() == token, (golden["id"], position)
            logits = driver.step((request, 1))
