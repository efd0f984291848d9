"""Tiny random models of every family give the logits of `transformers`, however their tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headrace.device.ops.interface import Ops
from headrace.device.ops.reference.ops import ReferenceOps
from headrace.device.platform.hardware import NATIVE_MODULE
from tests.device.families import FAMILIES, hf_logits, make_hf_model, save_hf_model
from tests.device.models import Driver

IDS = torch.randint(3, 96, (45,), generator=torch.Generator().manual_seed(1)).tolist()


def make_all_ops() -> Iterator[Ops]:
    """Every implementation that is built here, in exact numbers."""
    yield ReferenceOps()
    if find_spec(NATIVE_MODULE) is not None:
        from headrace.device.ops.cpu.ops import NativeOps

        yield NativeOps(2, "exact")


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_equal_the_oracle_in_any_cut(family: str, tmp_path: Path) -> None:
    hf = make_hf_model(family)
    expected = hf_logits(hf, IDS)
    save_hf_model(hf, tmp_path)
    for ops in make_all_ops():
        driver = Driver.load(tmp_path, ops=ops)
        whole, *cut = (driver.run(IDS, chunks) for chunks in (None, [7, 1, 20, 17], [1] * len(IDS)))
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
        for other in cut:
            if ops.name == "native":
                assert torch.equal(other, whole)
            else:
                torch.testing.assert_close(other, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("served", "length"), [(32, 30), (33, 33)])
def test_longrope_takes_its_set_by_the_longest_sequence_served(served: int, length: int, tmp_path: Path) -> None:
    hf = make_hf_model("phi3-longrope")
    driver = Driver.load(save_hf_model(hf, tmp_path), max_model_len=served)
    torch.testing.assert_close(driver.run(IDS[:length]), hf_logits(hf, IDS[:length]), atol=1e-4, rtol=1e-4)
