"""Every kind of checkpoint gives the same model, and one that does not fit is refused with the tensor's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as QType
from safetensors.torch import load_file, save_file

from headrace.base.errors import ConfigError, ModelFileError
from headrace.device.distributed.groups import Group, IntermediateTensors, ParallelGroups
from headrace.device.loading.loader import load_model
from headrace.device.ops.reference.ops import ReferenceOps
from tests.device.families import hf_logits, make_hf_model, save_hf_model
from tests.device.gguf_files import quantize_like_file, write_gguf
from tests.device.models import BLOCK_SIZE, Driver, make_config
from tests.device.test_formats import random_tensor

IDS = torch.randint(3, 96, (45,), generator=torch.Generator().manual_seed(1)).tolist()
IN_GGUF = (
    "llama",
    "llama-tied",
    "llama-bias",
    "llama-llama3",
    "llama-linear",
    "llama-yarn",
    "mistral-full",
    "qwen2",
    "qwen3",
    "gemma2-head-scale",
    "gemma3-head-scale",
    "gemma3-linear",
    "phi3",
    "phi3-window",
    "phi3-longrope",
    "olmo2",
)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_hf_model("llama")


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    return save_hf_model(llama, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_GGUF)
def test_gguf_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    hf = make_hf_model(family)
    close(Driver.load(write_gguf(hf, tmp_path / "m.gguf")).run(IDS, [20, 25]), hf_logits(hf, IDS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_gguf_gives_the_logits_of_its_numbers(name: str, tmp_path: Path) -> None:
    hf = make_hf_model("llama-tied")
    path = write_gguf(hf, tmp_path / "m.gguf", QType[name])
    quantize_like_file(hf, QType[name])
    close(Driver.load(path).run(IDS), hf_logits(hf, IDS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_give_the_logits_of_their_numbers(name: str, tmp_path: Path) -> None:
    hf = make_hf_model("llama-wide")
    largest_scale = {"Q2_K": 2e-3, "Q3_K": 1e-3}.get(name, 2e-4)
    packed = {}
    with torch.no_grad():
        for seed, (key, parameter) in enumerate(hf.named_parameters()):
            if parameter.ndim == 2:
                packed[key] = random_tensor(name, *parameter.shape, seed=seed, largest_scale=largest_scale)
                parameter.copy_(torch.from_numpy(packed[key].dequantize()))
    path = write_gguf(hf, tmp_path / "m.gguf", QType[name], packed=packed)
    close(Driver.load(path).run(IDS), hf_logits(hf, IDS))


def test_shards_give_the_same_logits_and_the_index_is_obeyed(llama: Any, tmp_path: Path) -> None:
    save_hf_model(llama, tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    # A stray old file and a wrong copy in another shard must not be looked at.
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "old.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(s for s in shards if s.name != index["model.norm.weight"])
    save_file(load_file(other) | {"model.norm.weight": torch.full((64,), 9.0)}, other)
    close(Driver.load(tmp_path).run(IDS), hf_logits(llama, IDS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    hf = make_hf_model("llama").to(dtype)
    save_hf_model(hf, tmp_path)
    close(Driver.load(tmp_path).run(IDS), hf_logits(type(hf).from_pretrained(tmp_path, dtype=torch.float32), IDS))


def test_a_head_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    hf = make_hf_model("llama-tied")
    file = save_hf_model(hf, tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(96, 64)}, file)
    close(Driver.load(tmp_path).run(IDS), hf_logits(hf, IDS))


def test_tied_ends_are_packed_once(tmp_path: Path) -> None:
    model = Driver.load(save_hf_model(make_hf_model("llama-tied"), tmp_path)).model
    assert model._vocabulary.table is model._vocabulary.head


def test_progress_ends_at_the_whole(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(make_config(folder), ReferenceOps(), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add (or, with ``None``, remove) tensors; ``__`` in a name stands for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__layers__1__mlp__up_proj__weight": None}, r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        ({"lm_head__weight": None}, r"no tensor 'lm_head\.weight'"),
        ({"model__norm__weight": torch.zeros(63)}, r"'model\.norm\.weight' has shape \[63\].*needs \[64\]"),
        (
            {"model__layers__0__self_attn__q_proj__weight": torch.zeros(60, 64)},
            r"'model\.layers\.0\.self_attn\.q_proj\.weight' has shape \[60, 64\].*needs \[64, 64\]",
        ),
        ({"model__layers__0__extra__weight": torch.zeros(2)}, r"does not use: model\.layers\.0\.extra\.weight"),
        ({"model__layers__3__mlp__up_proj__weight": torch.zeros(96, 64)}, r"does not use: model\.layers\.3"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.int32)}, r"'model\.norm\.weight'.*I32 is not supported"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.float64)}, r"'model\.norm\.weight'.*F64 is not supported"),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_tensor(
    folder: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(ModelFileError, match=message) as caught:
        Driver.load(folder)
    assert str(folder) in str(caught.value)


def test_a_fused_matrix_must_have_exactly_its_rows(tmp_path: Path) -> None:
    save_hf_model(make_hf_model("phi3"), tmp_path)
    edit(tmp_path, model__layers__0__mlp__gate_up_proj__weight=torch.zeros(193, 64))
    with pytest.raises(ModelFileError, match=r"gate_up_proj.weight' has shape \[193, 64\].*needs \[192, 64\]"):
        Driver.load(tmp_path)


def test_many_leftovers_are_counted(folder: Path) -> None:
    edit(folder, **{f"extra{i}": torch.zeros(1) for i in range(8)})
    with pytest.raises(ModelFileError, match=r"extra0, .*extra4 and 3 more"):
        Driver.load(folder)


def test_a_gguf_tensor_that_is_missing_is_named(llama: Any, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", drop=lambda name: name == "blk.2.attn_k.weight")
    with pytest.raises(ModelFileError, match=r"no tensor 'blk\.2\.attn_k\.weight'"):
        Driver.load(path)


def test_an_unusable_backend_is_refused_with_its_reason(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cpu_native.*needs the native operators"):
        load_model(make_config(folder, backend="cpu_native"), ReferenceOps())
    with pytest.raises(ConfigError, match="unknown attention backend 'magic'; known: "):
        load_model(make_config(folder, backend="magic"), ReferenceOps())


@pytest.mark.parametrize("family", ["llama", "llama-tied", "olmo2"])
def test_pipeline_stages_pass_hidden_states_on(family: str, tmp_path: Path) -> None:
    hf = make_hf_model(family)
    config = make_config(save_hf_model(hf, tmp_path))
    whole = Driver.load(tmp_path)
    ids, ctx = whole.context([(whole.add(IDS), len(IDS))])
    carried: torch.Tensor | IntermediateTensors | None = None
    with torch.inference_mode():
        for rank in range(2):
            stage = load_model(config, ReferenceOps(), ParallelGroups(pp=Group(rank, 2))).model
            assert len(stage.layer_facts()) == (2, 1)[rank]
            assert carried is None or isinstance(carried, IntermediateTensors)
            carried = stage.forward(ids, ctx, carried)
        assert isinstance(carried, torch.Tensor)
        close(stage.compute_logits(carried), hf_logits(hf, IDS))


def test_a_step_of_many_requests_equals_each_alone(llama: Any, folder: Path) -> None:
    driver = Driver.load(folder)
    requests = [driver.add(IDS[: 9 + 4 * i]) for i in range(5)]
    expected = [hf_logits(llama, r.ids) for r in requests]
    driver.step((requests[0], 8), (requests[1], 3), (requests[2], 5))
    logits = driver.step((requests[0], 1), (requests[1], 1), (requests[3], 21), (requests[4], 7), (requests[2], 4))
    wanted = [expected[0][8:9], expected[1][3:4], expected[3], expected[4][:7], expected[2][5:9]]
    close(logits, torch.cat(wanted))
    assert driver.caches[0].key.shape[-1] == BLOCK_SIZE
    assert torch.count_nonzero(driver.caches[0].key[0]) == 0
