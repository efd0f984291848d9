"""Tiny random models of every family give the logits of `transformers`, however their tokens are cut into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.device.families import FAMILIES, hf_logits, make_hf_model, save_hf_model
from tests.device.models import Driver

IDS = torch.randint(3, 96, (45,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_equal_the_oracle_in_any_cut(family: str, tmp_path: Path) -> None:
    hf = make_hf_model(family)
    expected = hf_logits(hf, IDS)
    driver = Driver.load(save_hf_model(hf, tmp_path))
    for chunks in (None, [7, 1, 20, 17], [1] * len(IDS)):
        torch.testing.assert_close(driver.run(IDS, chunks), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("served", "length"), [(32, 30), (33, 33)])
def test_longrope_takes_its_set_by_the_longest_sequence_served(served: int, length: int, tmp_path: Path) -> None:
    hf = make_hf_model("phi3-longrope")
    driver = Driver.load(save_hf_model(hf, tmp_path), max_model_len=served)
    torch.testing.assert_close(driver.run(IDS[:length]), hf_logits(hf, IDS[:length]), atol=1e-4, rtol=1e-4)
