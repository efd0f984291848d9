"""Every decoder gives the values that the gguf package gives, and rows can be taken without decoding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headrace.base.errors import ModelFileError
from headrace.device.quantization.formats import FORMATS, format_by_name
from headrace.device.quantization.raw_tensor import RawTensor, make_raw_float


def random_tensor(name: str, rows: int, cols: int, seed: int = 0, largest_scale: float = 0.1) -> RawTensor:
    """Random bits of a format; float16 scales are kept finite and moderate."""
    rng = np.random.default_rng(seed)
    fmt = format_by_name(name)
    if fmt.block == 1:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        qtype = gguf.GGMLQuantizationType[name]
        data = gguf.quants.quantize(values, qtype).view(np.uint8).reshape(rows, -1)
        return RawTensor(f"{name}.test", (rows, cols), fmt, data)
    blocks = rng.integers(0, 256, (rows * cols // fmt.block, fmt.block_bytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    places |= {"Q4_K": (0, 2), "Q5_K": (0, 2)}
    for at in places.get(name, (0,)):
        scale = rng.uniform(-largest_scale, largest_scale, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return RawTensor(f"{name}.test", (rows, cols), fmt, blocks.reshape(rows, -1))


@pytest.mark.parametrize("name", list(FORMATS))
def test_decoder_agrees_with_the_gguf_package(name: str) -> None:
    raw = random_tensor(name, 6, 512)
    expected = gguf.quants.dequantize(raw.data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(raw.dequantize(), expected.reshape(6, 512).astype(np.float32))
    size, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (raw.format.block, raw.format.block_bytes) == (size, type_size)


@pytest.mark.parametrize("name", list(FORMATS))
def test_rows_and_columns_are_taken_without_decoding(name: str) -> None:
    raw = random_tensor(name, 6, 1024)
    full = raw.dequantize()
    order = np.array([4, 0, 5])
    np.testing.assert_array_equal(raw.take_rows(order).dequantize(), full[order])
    np.testing.assert_array_equal(raw.take_rows(slice(1, 3)).dequantize(), full[1:3])
    np.testing.assert_array_equal(raw.take_cols(256, 768).dequantize(), full[:, 256:768])


def test_columns_must_not_cut_a_group() -> None:
    with pytest.raises(ModelFileError, match="Q4_0 group of 32"):
        random_tensor("Q4_0", 2, 64).take_cols(0, 16)


def test_values_of_a_vector_are_taken_singly() -> None:
    raw = make_raw_float("bias", np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(raw.take_rows(np.array([3, 1])).dequantize(), [3, 1])


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ModelFileError, match=r"IQ2_XS is not supported.*Q4_K"):
        format_by_name("IQ2_XS")
