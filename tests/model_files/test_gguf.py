"""The GGUF reader against the format's own library, and on files that are broken in every way."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.errors import ModelFileError
from headrace.model_files.gguf import GGUFFile
from tests.model_files.builders import write_gguf

METADATA = {
    "block_count": 3,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "flag": True,
    "words": ["a", "bé", "", "中文😀"],
    "numbers": [1, -2, 3],
    "floats": [0.5, 1.5],
    "general.name": "tiny",
}


def make_file(folder: Path, alignment: int | None = None) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.standard_normal((3, 32)).astype(np.float32),
        "b.weight": rng.standard_normal((5, 64)).astype(np.float16),
        "c.bias": rng.standard_normal(7).astype(np.float32),
    }
    return write_gguf(folder / "tiny.gguf", "llama", METADATA, tensors, alignment)


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_agrees_with_the_reference_library(tmp_path: Path, alignment: int | None) -> None:
    path = make_file(tmp_path, alignment)
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            assert ours.metadata[field.name] == field.contents()
    assert ours.names() == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.info(tensor.name)
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (info.type_name, info.offset, info.nbytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_real_file_agrees_with_the_reference_library(smollm2_gguf: Path) -> None:
    file = GGUFFile.open(smollm2_gguf)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.info("token_embd.weight").shape == (49152, 576)
    assert file.info("token_embd.weight").type_name == "Q8_0"
    assert file.info("blk.0.attn_q.weight").type_name == "Q4_1"
    assert file.raw("blk.29.ffn_up.weight").nbytes == 1536 * 576 // 32 * 20


def test_views_stay_valid_after_close_and_release(tmp_path: Path) -> None:
    file = GGUFFile.open(make_file(tmp_path))
    view = file.raw("a.weight")
    before = view.tobytes()
    file.release("a.weight")
    file.close()
    assert view.tobytes() == before
    assert not view.flags.writeable


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = make_file(tmp_path)
    end = max(info.offset + info.nbytes for info in GGUFFile.open(path).tensors.values())
    whole = path.read_bytes()[:end]
    path = tmp_path / "cut.gguf"
    cuts = [0, 1, 3, 4, 7, 8, 20, 24, *random.Random(1).sample(range(25, len(whole)), 60)]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            GGUFFile.open(path)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_in_the_header_is_an_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped bytes never give another exception, a hang, or a view beyond the file."""
    path = tmp_path / "tiny.gguf"
    whole = bytearray(path.read_bytes() if path.exists() else make_file(tmp_path).read_bytes())
    header = min(len(whole), 900)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole)
    try:
        file = GGUFFile.open(damaged)
    except ModelFileError as error:
        assert "damaged.gguf" in str(error)
    else:
        for name in file.names():
            assert file.raw(name).nbytes == file.info(name).nbytes


def test_wrong_magic_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ModelFileError, match="does not begin with 'GGUF'"):
        GGUFFile.open(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelFileError, match="version 1 is not supported"):
        GGUFFile.open(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ModelFileError, match="big-endian"):
        GGUFFile.open(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        GGUFFile.open(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match="empty"):
        GGUFFile.open(tmp_path / "empty.gguf")


def make_table(entries: list[tuple[str, list[int], int, int]], payload: int = 0) -> bytes:
    """A file with only a tensor table: (name, dims with the contiguous one first, type number, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(entries), 0)
    for name, dims, kind, offset in entries:
        raw = name.encode()
        out += struct.pack("<Q", len(raw)) + raw + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32) + bytes(payload)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("w", [32], 99, 0)], "type number 99; supported: F32"),
        ([("w", [33], 2, 0)], "rows of 33 values, not whole Q4_0 blocks"),
        ([("w", [8], 0, 0), ("w", [8], 0, 32)], "'w' appears twice"),
        ([("v", [16], 0, 0), ("w", [8], 0, 32)], "'v' and 'w' overlap"),
        ([("w", [8], 0, 5)], "not a multiple of 32"),
        ([("w", [1 << 40], 0, 0)], "truncated"),
        ([("w", [1, 1, 1, 1, 1], 0, 0)], "5 dimensions"),
    ],
)
def test_tables_that_cannot_be_right(
    tmp_path: Path, entries: list[tuple[str, list[int], int, int]], message: str
) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(make_table(entries, payload=96))
    with pytest.raises(ModelFileError, match=message):
        GGUFFile.open(path)


def test_one_part_of_a_split_model(tmp_path: Path) -> None:
    path = tmp_path / "p.gguf"
    path.write_bytes(make_pairs([("split.count", 1)]))
    GGUFFile.open(path)
    path.write_bytes(make_pairs([("split.count", 2)]))
    with pytest.raises(ModelFileError, match="one of 2 parts"):
        GGUFFile.open(path)


def make_pairs(pairs: list[tuple[str, int]]) -> bytes:
    """A file with only 16-bit metadata."""
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, value in pairs:
        out += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IH", 2, value)
    return out


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no tensor 'nope'"):
        GGUFFile.open(make_file(tmp_path)).raw("nope")


def test_metadata_key_depends_on_metadata_alone(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("1.gguf", "2.gguf", "3.gguf"))
    write_gguf(one, "llama", {"a": 1}, {"w": np.zeros(8, np.float32)})
    write_gguf(two, "llama", {"a": 1}, {"w": np.ones(8, np.float32)})
    write_gguf(three, "llama", {"a": 2}, {"w": np.zeros(8, np.float32)})
    keys = [GGUFFile.open(path).metadata_key() for path in (one, two, three)]
    assert keys[0] == keys[1] != keys[2]
