"""Safetensors checkpoints: what the index says is what is read, and anything it cannot keep is an error."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.base.errors import ModelFileError
from headrace.model_files.checkpoint import find_gguf, open_checkpoint
from headrace.model_files.safetensors import SafetensorsCheckpoint
from tests.model_files.builders import write_gguf, write_shards

A, B, C = (np.full((2, 3), value, np.float32) for value in (1.0, 2.0, 3.0))
SHARDS = {
    f"model-0000{i}-of-00003.safetensors": {name: values} for i, name, values in ((1, "a", A), (2, "b", B), (3, "c", C))
}
NAMES = list(SHARDS)


def values_of(checkpoint: SafetensorsCheckpoint, name: str) -> np.ndarray:
    return checkpoint.raw(name).view(np.float32).reshape(checkpoint.info(name).shape)


def test_single_file_and_folder(tmp_path: Path) -> None:
    tensors = {
        "a": A,
        "half": B.astype(np.float16),
        "ints": np.arange(5, dtype=np.int64),
        "none": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = SafetensorsCheckpoint.open(path)
        assert sorted(checkpoint.names()) == sorted(tensors)
        assert checkpoint.info("half").type_name == "F16"
        for name, values in tensors.items():
            assert checkpoint.info(name).shape == values.shape
            assert checkpoint.raw(name).tobytes() == values.tobytes()


def test_shards_are_joined_by_the_index(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint.open(write_shards(tmp_path, SHARDS))
    assert [float(values_of(checkpoint, name)[0, 0]) for name in "abc"] == [1.0, 2.0, 3.0]
    checkpoint.release("a")
    view = checkpoint.raw("a")
    checkpoint.close()
    assert view.view(np.float32)[0] == 1.0


def test_missing_shard(tmp_path: Path) -> None:
    """B107."""
    write_shards(tmp_path, SHARDS)
    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(ModelFileError, match=f"{NAMES[1]}: is missing, but model.safetensors.index.json names it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_shard(tmp_path: Path, keep: int) -> None:
    write_shards(tmp_path, SHARDS)
    shard = tmp_path / NAMES[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=NAMES[1]):
        open_checkpoint(tmp_path)


def test_stray_files_are_not_looked_at(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    save_file({"a": A * 100}, tmp_path / "model.safetensors")
    (tmp_path / "old.safetensors").write_bytes(b"not a model")
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    assert values_of(checkpoint, "a")[0, 0] == 1.0


def test_a_copy_in_another_shard_is_not_taken(tmp_path: Path) -> None:
    shards = {**SHARDS, NAMES[2]: {"c": C, "a": A * 100}}
    write_shards(tmp_path, shards, weight_map={"a": NAMES[0], "b": NAMES[1], "c": NAMES[2]})
    assert values_of(SafetensorsCheckpoint.open(tmp_path), "a")[0, 0] == 1.0


def test_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS, weight_map={"a": NAMES[1], "b": NAMES[1], "c": NAMES[2]})
    with pytest.raises(ModelFileError, match=f"{NAMES[1]}: has no tensor 'a'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "weight_map"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "empty"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": 3}}', "not a file name"),
    ],
)
def test_broken_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(tmp_path)


def make_raw(header: object, payload: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(payload)


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        ({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, 24, "'b' overlaps 'a'"),
        ({"a": entry(0, 16, [4]), "b": entry(24, 40, [4])}, 40, "gap before"),
        ({"a": entry(0, 16, [4])}, 20, "belong to no tensor"),
        ({"a": entry(0, 16, [5])}, 16, "its shape needs 20"),
        ({"a": entry(0, 16, [4], "F3")}, 16, "dtype 'F3'; supported"),
        ({"a": entry(0, 16, [-4])}, 16, "entry of tensor 'a' is broken"),
        ({"a": {"dtype": "F32"}}, 0, "entry of tensor 'a' is broken"),
        ([1], 0, "not a table"),
    ],
)
def test_headers_that_cannot_be_right(tmp_path: Path, header: object, payload: int, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(make_raw(header, payload))
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(path)


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no model weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "part.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="without the index"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelFileError, match="no such file or folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelFileError, match="no tensor 'z'"):
        SafetensorsCheckpoint.open(write_shards(tmp_path / "s", SHARDS)).raw("z")


def test_folders_with_gguf_files(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf", "llama", {}, {"w": A})
    assert find_gguf(tmp_path) == one
    assert open_checkpoint(tmp_path).names() == ["w"]
    write_gguf(tmp_path / "two.gguf", "llama", {}, {"w": A})
    with pytest.raises(ModelFileError, match=r"2 \.gguf files"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
