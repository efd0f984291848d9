"""Resolution decides every open value with a reason and refuses what cannot work."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.config.architecture import Architecture, RopeConfig
from headrace.config.flags import add_flags, settings_from_args
from headrace.config.hardware import HardwareInfo
from headrace.config.resolve import SECTIONS, resolve
from headrace.config.sections import EngineConfig
from headrace.config.units import format_size, parse_size

GIB = 1 << 30
CPU = HardwareInfo("cpu", 2, 24 * GIB, 20 * GIB, isa="avx2", native_ops=True)
ARCH = Architecture(
    name="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position=512,
    norm_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
    layer_kinds=("full", "full"),
    weight_format="Q4_1",
)


def make(hardware: HardwareInfo = CPU, architecture: Architecture = ARCH, **settings: Any) -> EngineConfig:
    return resolve(settings, hardware, architecture, "model.gguf")


def test_every_field_has_a_reason_and_none_is_left_open() -> None:
    config = make()
    for section, kind in SECTIONS.items():
        for field in fields(kind):
            assert config.reasons[f"{section}.{field.name}"]
            assert getattr(getattr(config, section), field.name) != "auto", field.name
    assert config.max_model_len == 512
    assert config.cache.block_size > 0 and config.scheduler.max_num_seqs > 0


def test_whether_forwards_are_captured_has_a_reason() -> None:
    config = make()
    assert config.device.enforce_eager is False
    assert config.reasons["device.enforce_eager"].startswith("the native operators become one captured plan: FULL")
    config = make(enforce_eager=True)
    assert config.device.enforce_eager is True
    assert config.reasons["device.enforce_eager"] == "set by the user: steps run EAGER"
    assert make(tensor_parallel_size=2).reasons["device.enforce_eager"].endswith("steps run EAGER")
    for settings in ({}, {"enforce_eager": False}):
        config = make(replace(CPU, native_ops=False), **settings)
        assert config.device.enforce_eager is True
        assert "the reference operators are called one by one" in config.reasons["device.enforce_eager"]


def test_packed_weights_are_kept_where_packing_costs_something() -> None:
    assert make().model.packed_cache == 8 * GIB
    assert make(packed_cache="1MiB").model.packed_cache == 1 << 20
    assert make(packed_cache=0).model.packed_cache == 0
    config = make(replace(CPU, native_ops=False))
    assert config.model.packed_cache == 0 and "reference" in config.reasons["model.packed_cache"]


def test_a_choice_that_may_be_left_open_takes_its_values_and_no_others() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = settings_from_args(parser.parse_args(["--quantization", "int8"]))
    assert make(**given).model.quantization == "int8"
    assert make(quantization=None).model.quantization is None
    with pytest.raises(ConfigError, match="--quantization must be one of int8, int4"):
        make(quantization="int3")


def test_streams_are_protected_from_prompts_on_cpu_unless_told_otherwise() -> None:
    config = make()
    assert (config.scheduler.max_token_gap_factor or 0.0) > 1.0
    assert "pace" in config.reasons["scheduler.max_token_gap_factor"]
    assert make(max_token_gap_ms=50.0).scheduler.max_token_gap_factor == 0.0
    assert make(max_token_gap_factor=0.0).scheduler.max_token_gap_factor == 0.0
    assert make(replace(CPU, platform="cuda")).scheduler.max_token_gap_factor == 0.0


def test_quantised_weights_take_int8_activations_unless_float32_is_asked_for() -> None:
    assert make().model.activations == "int8"
    assert make().cache.kv_cache_dtype == "float16"
    exact = make(dtype="float32")
    assert (exact.model.activations, exact.cache.kv_cache_dtype) == ("exact", "float32")
    assert make(architecture=replace(ARCH, weight_format="F32")).model.activations == "exact"
    assert make(replace(CPU, native_ops=False)).model.activations == "exact"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 513}, "max-model-len"),
        ({"max_model_len": 0}, "max-model-len"),
        ({"pipeline_depth": 0}, "pipeline-depth"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max-num-batched-tokens"),
        ({"kv_cache_share": float("nan")}, "kv-cache-share"),
        ({"max_token_gap_ms": float("nan")}, "max-token-gap-ms"),
        ({"max_token_gap_factor": 0.5}, "max-token-gap-factor"),
        ({"max_modle_len": 4}, "did you mean max_model_len"),
        ({"max_num_queued_reqs": 0}, "max-num-queued-reqs"),
        ({"dtype": "float61"}, "dtype must be one of auto, float32, bfloat16"),
        ({"activations": "fast"}, "cpu-activations"),
        ({"seed": "7"}, "seed must be an integer"),
        ({"max_num_seqs": True}, "max-num-seqs must be an integer"),
        ({"enable_prefix_caching": "no"}, "enable-prefix-caching must be true or false"),
        ({"block_size": None}, "block-size"),
        ({"kv_cache_memory": "3 parsecs"}, "not a size"),
        ({"executor": "uniproc", "tensor_parallel_size": 2}, "executor uniproc"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**settings)


def test_native_ops_and_int8_need_built_kernels() -> None:
    bare = replace(CPU, native_ops=False)
    with pytest.raises(ConfigError, match="native"):
        make(bare, ops="native")
    with pytest.raises(ConfigError, match="native"):
        make(bare, activations="int8")


def test_sizes_may_be_written_with_units_and_whole_numbers_stand_for_floats() -> None:
    assert make(kv_cache_memory="256MiB").cache.kv_cache_memory == 256 << 20
    assert make(max_token_gap_ms=50).scheduler.max_token_gap_ms == 50.0


def test_flags_give_only_what_was_written() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    args = parser.parse_args(
        ["--kv-cache-memory", "256MiB", "--no-enable-prefix-caching", "--max-model-len", "128", "--dtype", "float32"]
    )
    assert settings_from_args(args) == {
        "kv_cache_memory": 256 << 20,
        "enable_prefix_caching": False,
        "max_model_len": 128,
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    ("settings", "path", "name"),
    [
        ({"model": "smollm2-135m"}, "/cache/models/SmolLM2.gguf", "smollm2-135m"),
        ({"model": "org/name"}, "/cache/hub/models--org--name/snapshots/abc", "org/name"),
        ({"model": "/secret/models/Tiny.Q4_1.gguf"}, "/secret/models/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ({"model": "~/models/tiny"}, str(Path("~/models/tiny").expanduser()), "tiny"),
        ({"model": "./models/tiny/"}, "models/tiny", "tiny"),
        ({"model": "."}, ".", Path.cwd().name),
        ({"model": "/secret/tiny", "served_model_name": "mine"}, "/secret/tiny", "mine"),
    ],
)
def test_the_name_that_clients_see_is_never_a_path(settings: dict[str, Any], path: str, name: str) -> None:
    assert resolve(settings, CPU, ARCH, path).model.served_model_name == name


def test_sizes() -> None:
    assert parse_size("256MiB") == 256 << 20
    assert parse_size("2GB") == 2 * 10**9
    assert parse_size("1.5k") == 1500
    assert format_size(98_362_432) == "93.8 MiB"
    for wrong in ("", "MiB", "-1", "3 parsecs"):
        with pytest.raises(ConfigError):
            parse_size(wrong)
