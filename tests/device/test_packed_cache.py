"""Packed weights from disk: the same bytes as fresh ones, or fresh ones; never anything else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

pytest.importorskip("headrace.device.ops.cpu._native", reason="the native kernels are not built")

from headrace.device.loading.packed_cache import LEAST_BYTES, PackedCache, open_packed_cache
from headrace.testing.engine_config import make_engine_config

BOUND = 1 << 30
SIZES = [(100,), (LEAST_BYTES, 5000), (4096,)]


def make_pieces(seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 256, size, dtype=np.uint8) for size in sizes] for sizes in SIZES]


def load(path: Path, weights: list[list[np.ndarray]], max_bytes: int = BOUND) -> int:
    """One start: returns how many weights came from the file, all of them checked."""
    cache, num_taken = PackedCache(path, max_bytes), 0
    for number, fresh in enumerate(weights):
        pieces = cache.take(f"form {number}")
        if pieces is None:
            cache.keep(f"form {number}", fresh)
            continue
        num_taken += 1
        assert all(not piece.flags.writeable and piece.ctypes.data % 64 == 0 for piece in pieces)
        assert all(np.array_equal(a, b) for a, b in zip(pieces, fresh, strict=True))
    cache.finish()
    return num_taken


def test_the_second_start_takes_what_the_first_one_packed(tmp_path: Path) -> None:
    weights, path = make_pieces(), tmp_path / "packed" / "one"
    assert load(path, weights) == 0
    before = path.stat().st_ino
    assert load(path, weights) == len(weights)
    assert path.stat().st_ino == before and [file.name for file in path.parent.iterdir()] == ["one"]


@pytest.mark.parametrize(("place", "num_taken"), [(0, 0), (20, 0), (4096 + 50, 0), (3 * 4096, 1), (-1, 0)], ids=str)
def test_a_spoilt_file_is_packed_anew_with_a_warning(
    tmp_path: Path, place: int, num_taken: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)
    weights, path = make_pieces(), tmp_path / "one"
    load(path, weights)
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert load(path, weights) == num_taken
    assert "packed anew" in caplog.text and str(path) in caplog.text
    assert load(path, weights) == len(weights)


@pytest.mark.parametrize("size", [0, 100, 5000, LEAST_BYTES + 4096])
def test_a_torn_file_is_packed_anew(tmp_path: Path, size: int) -> None:
    weights, path = make_pieces(), tmp_path / "one"
    load(path, weights)
    os.truncate(path, size)
    assert load(path, weights) == 0
    assert load(path, weights) == len(weights)


def test_other_forms_are_not_taken(tmp_path: Path) -> None:
    weights, path = make_pieces(), tmp_path / "one"
    load(path, weights)
    cache = PackedCache(path, BOUND)
    assert cache.take("form 0") is not None
    assert cache.take("form 2") is None
    assert cache.take("form 1") is None


def test_the_folder_is_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    weights = make_pieces()
    for age, name in enumerate(["new", "old", "oldest"]):
        load(tmp_path / name, weights)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / ".left.1").write_bytes(b"")
    os.utime(tmp_path / ".left.1", (1e9, 1e9))
    assert load(tmp_path / "old", weights) == len(weights)
    load(tmp_path / "newest", weights, max_bytes=3 * LEAST_BYTES)
    assert {file.name for file in tmp_path.iterdir()} == {"old", "newest"}


def test_what_exceeds_the_bound_or_is_small_is_not_kept(tmp_path: Path) -> None:
    load(tmp_path / "one", make_pieces(), max_bytes=LEAST_BYTES)
    load(tmp_path / "two", [[np.zeros(5000, np.uint8)]])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)
    (tmp_path / "file").write_bytes(b"")
    assert load(tmp_path / "file" / "one", make_pieces()) == 0
    assert "cannot be kept" in caplog.text


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Where the packed weights of a model are kept."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))

    def find(model: Path, **settings: object) -> Path:
        config = make_engine_config(**settings)
        config = replace(config, model_path=str(model), model=replace(config.model, packed_cache=BOUND))
        return open_packed_cache(config, None).path

    return find


def test_the_key_is_the_content_whatever_the_file_is_called(tmp_path: Path, key_of: Callable[..., Path]) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(np.random.default_rng(0).bytes((16 << 20) + 5))
    first = key_of(model)
    assert first.parent == tmp_path / "home" / "packed"
    assert key_of(model, quantization="int8") != first
    (tmp_path / "elsewhere").mkdir()
    for name in ("other.gguf", "elsewhere/model.gguf"):
        copy = tmp_path / name
        copy.write_bytes(model.read_bytes())
        assert key_of(copy) == first
    (tmp_path / "link.gguf").symlink_to(model)
    assert key_of(tmp_path / "link.gguf") == first
    assert key_of(tmp_path / "elsewhere") == first, "a folder with nothing but this file"


@pytest.mark.parametrize("place", [0, 8 << 20, (16 << 20) + 4], ids=str)
def test_one_changed_byte_is_another_model_even_if_the_times_are_put_back(
    tmp_path: Path, place: int, key_of: Callable[..., Path]
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes((16 << 20) + 5))
    first, times = key_of(model), model.stat()
    with model.open("r+b") as file:
        file.seek(place)
        file.write(b"\1")
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert key_of(model) != first
    os.truncate(model, (16 << 20) + 4)
    assert key_of(model) != first


def test_the_key_of_a_folder_is_that_of_its_weights_and_settings(tmp_path: Path, key_of: Callable[..., Path]) -> None:
    keys = []
    for number, (config, name, weights) in enumerate(
        [(b"{}", "a", b"one"), (b"{}", "b", b"one"), (b"{}", "a", b"two"), (b"[]", "a", b"one"), (b"{}", "a", b"")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_bytes(config)
        (folder / f"{name}.safetensors").write_bytes(weights)
        (folder / "README.md").write_text(str(number))
        keys.append(key_of(folder))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def _load_when_all_are_here(path: Path, barrier: Barrier) -> int:
    weights = make_pieces()
    barrier.wait(timeout=60)
    return load(path, weights)


@pytest.mark.slow
def test_processes_that_start_at_once_each_have_their_weights(tmp_path: Path) -> None:
    path, weights = tmp_path / "one", make_pieces()
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(2, mp_context=context) as pool:
        barrier = manager.Barrier(2)
        starts = [pool.submit(_load_when_all_are_here, path, barrier) for _ in range(2)]
        for start in starts:
            assert start.result(timeout=120) in (0, len(weights))
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    assert load(path, weights) == len(weights)
