"""`Architecture` from both formats, against what the reference library makes of the same settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ModelFileError
from headrace.model_files.architecture import generation_defaults, read_architecture
from tests.model_files.builders import LLAMA_METADATA, llama_tensors, write_gguf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
LONG, SHORT = [1.5, 1.6, 1.7, 1.8, 1.9, 2.0], [1.1] * 6
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": None, "head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    (
        "Llama",
        {
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    (
        "Qwen2",
        {
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        },
    ),
    ("Mistral", {}),
    ("Mistral", {"sliding_window": None}),
    ("Mistral", {"sliding_window": 16}),
    ("Qwen2", {}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 16}),
    ("Qwen3", {}),
    ("Qwen3", {"attention_bias": True, "head_dim": 16}),
    ("Gemma2", {}),
    ("Gemma2", {"attn_logit_softcapping": None, "query_pre_attn_scalar": 144, "sliding_window": 8}),
    ("Gemma3Text", {}),
    (
        "Gemma3Text",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 16,
            "sliding_window_pattern": 3,
        },
    ),
    ("Phi3", {"pad_token_id": 0}),
    ("Phi3", {"sliding_window": 2047, "pad_token_id": 0}),
    (
        "Phi3",
        {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "long_factor": LONG, "short_factor": SHORT},
            "pad_token_id": 0,
        },
    ),
    ("Olmo2", {}),
    ("Olmo2", {"tie_word_embeddings": True}),
]


def write_config(folder: Path, settings: dict[str, Any], name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **settings}))
    return folder


def expected_layers(config: Any, num_layers: int) -> list[str]:
    window = getattr(config, "sliding_window", None)
    listed = getattr(config, "layer_types", None)
    if listed is None:
        return ["sliding_attention" if window else "full_attention"] * num_layers
    return list(listed)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
@pytest.mark.filterwarnings("ignore")
def test_agrees_with_the_reference_library(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    import transformers

    settings = {**SIZES, **more}
    config = getattr(transformers, f"{family}Config")(**json.loads(json.dumps(settings)))
    name = f"{family.removesuffix('Text')}ForCausalLM"
    sparse = read_architecture(write_config(tmp_path / "sparse", settings, name))
    full = read_architecture(write_config(tmp_path / "full", config.to_dict() | {"architectures": [name]}, name))
    # Token ids aside, leaving a setting to its default and writing it out are the same.
    blank = {"eos_token_ids": (), "bos_token_id": None}
    assert dataclasses.replace(sparse, **blank) == dataclasses.replace(full, **blank)

    assert full.name == name
    assert full.num_kv_heads == config.num_key_value_heads
    assert full.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert full.max_position == config.max_position_embeddings
    assert full.norm_eps == config.rms_norm_eps
    assert full.tie_embeddings == config.tie_word_embeddings
    kinds = {"sliding_attention": "sliding_window", "full_attention": "full"}
    assert list(full.layer_kinds) == [kinds[kind] for kind in expected_layers(config, 8)]
    assert full.window == ((config.sliding_window or 0) if "sliding_window" in full.layer_kinds else 0)
    if name.startswith("Gemma"):
        assert full.query_scale == config.query_pre_attn_scalar**-0.5
        assert full.attn_softcap == (config.attn_logit_softcapping or 0.0)
        assert full.final_softcap == (config.final_logit_softcapping or 0.0)
        assert (full.norm_offset, full.embedding_scale, full.activation) == (1.0, 8.0, "gelu_tanh")
    else:
        assert (full.query_scale, full.norm_offset, full.embedding_scale, full.activation) == (None, 0.0, 1.0, "silu")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
@pytest.mark.filterwarnings("ignore")
def test_rope_factors_are_those_of_the_reference_library(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    """Frequencies and the attention factor that the library computes follow from the record."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {**SIZES, **more}
    config = getattr(transformers, f"{family}Config")(**json.loads(json.dumps(settings)))
    rope = read_architecture(write_config(tmp_path, settings, f"{family.removesuffix('Text')}ForCausalLM")).rope
    base = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    factors = dict(rope.factors)
    layer = "full_attention" if family == "Gemma3Text" else None
    table = config.rope_parameters[layer] if layer else config.rope_parameters
    assert table["rope_theta"] == rope.theta
    if rope.scaling == "none":
        assert table["rope_type"] == "default"
        return
    reference, attention = ROPE_INIT_FUNCTIONS[table["rope_type"]](config, "cpu", seq_len=64, layer_type=layer)
    assert factors.get("attention_factor", 1.0) == pytest.approx(attention)
    if rope.scaling == "linear":
        np.testing.assert_allclose(reference.numpy(), base / factors["factor"], rtol=1e-6)
    elif rope.scaling == "longrope":
        np.testing.assert_allclose(reference.numpy(), base / np.array(rope.short_factors), rtol=1e-6)
        assert rope.long_factors == tuple(LONG)
        assert factors["original_max_position"] == 256
    else:
        assert factors["original_max_position"] == 512
        assert factors["factor"] in (4.0, 8.0)


def test_eos_and_sampling_defaults_of_a_folder(tmp_path: Path) -> None:
    write_config(tmp_path, SIZES | {"eos_token_id": 7, "bos_token_id": 1}, "LlamaForCausalLM")
    assert read_architecture(tmp_path).eos_token_ids == (7,)
    assert generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 9, 999], "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 64})
    )
    arch = read_architecture(tmp_path)
    assert arch.eos_token_ids == (2, 9) and arch.bos_token_id == 1
    assert generation_defaults(tmp_path) == {
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 64,
        "eos_token_ids": (2, 9, 999),
    }
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFileError, match=r"generation_config\.json: 'temperature' is 'hot', not a number"):
        generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported: LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "'architectures' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' is '64', not a whole number"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3"),
        ({"hidden_act": "relu"}, "'hidden_act' 'relu' is not supported; supported: silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported; supported: none"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: 'factor' is missing"),
        ({"rope_scaling": 3}, "'rope_scaling' is not a table"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation 'awq' is not supported"),
        ({"torch_dtype": "int4"}, "dtype 'int4' is not supported"),
        ({"head_dim": 15}, "rotary dimensions 15 are odd"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', not true or false"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    write_config(tmp_path, SIZES | more, "LlamaForCausalLM")
    with pytest.raises(ModelFileError, match=message):
        read_architecture(tmp_path)


def test_longrope_lists_must_fit(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0] * 8}
    write_config(tmp_path, SIZES | {"rope_scaling": scaling}, "Phi3ForCausalLM")
    with pytest.raises(ModelFileError, match="'long_factor' has 1 numbers instead of 8"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_architecture(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: no such file"):
        read_architecture(tmp_path)


# ---------------------------------------------------------------- GGUF


def test_default_model(smollm2_gguf: Path) -> None:
    arch = read_architecture(smollm2_gguf)
    assert (arch.name, arch.num_layers, arch.hidden_size, arch.head_dim) == ("LlamaForCausalLM", 30, 576, 64)
    assert (arch.num_heads, arch.num_kv_heads, arch.vocab_size) == (9, 3, 49152)
    assert arch.rope.theta == 100000.0 and arch.rope.rotary_dim == 64 and arch.norm_eps == 1e-5
    assert arch.tie_embeddings and arch.eos_token_ids == (2,) and arch.weight_format == "Q4_1"
    assert generation_defaults(smollm2_gguf) == {"eos_token_ids": (2,)}


def read_gguf(tmp_path: Path, architecture: str = "llama", more: dict[str, Any] | None = None, **tensors: Any) -> Any:
    metadata = {**LLAMA_METADATA, **(more or {})}
    return read_architecture(write_gguf(tmp_path / "m.gguf", architecture, metadata, llama_tensors(**tensors)))


def test_switches_that_only_tensors_tell(tmp_path: Path) -> None:
    plain = read_gguf(tmp_path)
    assert plain.tie_embeddings and not (plain.qkv_bias or plain.output_bias or plain.mlp_bias)
    zeros = np.zeros(32, np.float32)
    other = read_gguf(
        tmp_path,
        output__weight=np.zeros((40, 32), np.float32),
        blk__0__attn_q__bias=zeros,
        blk__0__attn_output__bias=zeros,
        blk__0__ffn_down__bias=zeros,
    )
    assert not other.tie_embeddings and other.qkv_bias and other.output_bias and other.mlp_bias


def test_stored_divisors_of_llama3(tmp_path: Path) -> None:
    divisors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    rope = read_gguf(tmp_path, rope_freqs__weight=divisors).rope
    assert rope.scaling == "longrope" and dict(rope.factors)["attention_factor"] == 1.0
    assert rope.long_factors == rope.short_factors == (1.0, 2.0, 4.0, 8.0)
    with pytest.raises(ModelFileError, match=r"'rope_freqs\.weight' is F32 \[3\] instead of F32 \[4\]"):
        read_gguf(tmp_path, rope_freqs__weight=divisors[:3])


def test_scalings_named_by_metadata(tmp_path: Path) -> None:
    linear = read_gguf(tmp_path, more={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert linear.rope.scaling == "linear" and linear.rope.factors == (("factor", 4.0),)
    yarn = read_gguf(
        tmp_path,
        more={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ).rope
    assert dict(yarn.factors)["attention_factor"] == pytest.approx(1 + 0.1 * np.log(4.0))
    with pytest.raises(ModelFileError, match=r"'llama\.rope\.scaling\.type' is 'ntk'; supported"):
        read_gguf(tmp_path, more={"rope.scaling.type": "ntk"})


def test_families_of_gguf(tmp_path: Path) -> None:
    gemma = read_gguf(tmp_path, "gemma2", {"attention.sliding_window": 16, "attention.key_length": 16})
    assert gemma.layer_kinds == ("sliding_window", "full") and gemma.window == 16
    assert (gemma.norm_offset, gemma.query_scale, gemma.attn_softcap, gemma.final_softcap) == (0.0, 0.25, 50.0, 30.0)
    gemma3 = read_gguf(tmp_path, "gemma3", {"attention.sliding_window": 16, "block_count": 7})
    assert gemma3.layer_kinds.count("full") == 1 and gemma3.layer_kinds[5] == "full"
    assert gemma3.rope.theta == 1e6 and gemma3.local_rope.theta == 10000.0 and gemma3.qk_norm == "head"
    phi = read_gguf(tmp_path, "phi3", {"attention.sliding_window": 8})
    assert phi.layer_kinds == ("sliding_window", "sliding_window") and phi.name == "Phi3ForCausalLM"
    assert read_gguf(tmp_path, "olmo2").qk_norm == "full"
    assert read_gguf(tmp_path, "qwen3").qk_norm == "head"
    assert read_gguf(tmp_path, "qwen2").name == "Qwen2ForCausalLM"


def test_end_of_turn_tokens_end_a_generation(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "<|eot_id|>", "<|im_end|>", "word"]
    arch = read_gguf(
        tmp_path,
        more={
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3, 1, 1],
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.bos_token_id": 0,
        },
    )
    assert arch.eos_token_ids == (1, 2) and arch.bos_token_id == 0


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported; supported: llama, qwen2"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"block_count": 0}, r"'llama\.block_count' is 0"),
        ("llama", {"attention.head_count": "4"}, "is '4', not one positive number"),
        ("olmo2", {"attention.sliding_window": 8}, "later family"),
    ],
)
def test_gguf_settings_that_cannot_work(tmp_path: Path, architecture: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_gguf(tmp_path, architecture, more)
