"""The forward is made of operators and views alone, and shows its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.errors import ConfigError, ModelFileError
from headrace.device.models.decoder import Decoder
from headrace.device.models.registry import get_model_class
from headrace.device.ops.reference.ops import ReferenceOps
from headrace.device.ops.registry import make_ops
from headrace.device.platform.hardware import NATIVE_MODULE
from headrace.device.runner.graphs import CapturedGraph, CapturedGraphs, GraphMode
from tests.device.families import make_hf_model, save_hf_model
from tests.device.models import Driver, make_config


class MarkedOps:
    """Operators that say when one of them runs."""

    name = "reference"

    def __init__(self) -> None:
        self._ops = ReferenceOps()
        self.running = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.running += 1
            try:
                return method(*args, **kwargs)
            finally:
                self.running -= 1

        return call


class NothingButViews(TorchDispatchMode):
    """Collects what PyTorch computes while no operator runs."""

    def __init__(self, ops: MarkedOps) -> None:
        super().__init__()
        self._ops = ops
        self.strays: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._ops.running and not func.is_view:
            self.strays.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"])
def test_nothing_is_computed_outside_operators(family: str, tmp_path: Path) -> None:
    ops = MarkedOps()
    driver = Driver.load(save_hf_model(make_hf_model(family), tmp_path), ops=ops)  # type: ignore[arg-type]
    ids, ctx = driver.context([(driver.add([5, 6, 7, 8, 9]), 3), (driver.add([3]), 1)])
    before = ctx.progress.read()
    with torch.inference_mode(), NothingButViews(ops) as guard:
        hidden = driver.model.forward(ids, ctx)
        assert isinstance(hidden, torch.Tensor)
        driver.model.compute_logits(hidden)
    assert guard.strays == set()
    assert ctx.progress.read() - before == driver.model.arch.num_layers


@pytest.mark.skipif(find_spec(NATIVE_MODULE) is None, reason="the native kernels are not built")
@pytest.mark.parametrize("family", ["llama-bias", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"])
def test_the_native_forward_is_captured_whole(family: str, tmp_path: Path) -> None:
    from headrace.device.ops.cpu.ops import NativeOps
    from headrace.device.ops.cpu.plan_runner import PlanRunner

    ops = NativeOps(1)
    driver = Driver.load(save_hf_model(make_hf_model(family), tmp_path), ops=ops)
    runner = PlanRunner(driver.model, ops)
    with torch.inference_mode():
        runner.capture(*driver.context([(driver.add([5, 6, 7, 8, 9]), 3), (driver.add([3]), 1)]))
    assert runner.captured == CapturedGraphs((CapturedGraph(GraphMode.FULL, max_tokens=4, max_reqs=2),))


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(
        ModelFileError, match=r"MambaForCausalLM is not supported; supported: LlamaForCausalLM, .*Olmo2"
    ):
        get_model_class("MambaForCausalLM")


def test_biases_of_the_feed_forward_are_refused(tmp_path: Path) -> None:
    hf = make_hf_model("llama")
    hf.config.mlp_bias = True
    save_hf_model(hf, tmp_path)
    with pytest.raises(ModelFileError, match="biases of the feed-forward products are not supported"):
        Driver.load(tmp_path)


def test_operators_are_made_by_name(tmp_path: Path) -> None:
    config = make_config(save_hf_model(make_hf_model("llama"), tmp_path))
    assert make_ops(config).name == "reference"
    with pytest.raises(ConfigError, match=r"--ops triton: not available here; available: reference, native"):
        make_ops(replace(config, device=replace(config.device, ops="triton")))
    with pytest.raises(ConfigError, match="--quantization needs the native operators"):
        make_ops(replace(config, model=replace(config.model, quantization="int8")))


def test_rotary_tables_reach_the_served_length(tmp_path: Path) -> None:
    model: Decoder = Driver.load(save_hf_model(make_hf_model("gemma3"), tmp_path), max_model_len=40).model
    assert {tuple(table.shape) for table in model._ropes} == {(40, 16)}
    assert len({table.data_ptr() for table in model._ropes}) == 2
