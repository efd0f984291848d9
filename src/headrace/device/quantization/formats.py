"""Storage formats of model files: block sizes and how to decode a block, vectorised over blocks.

Every decoder takes uint8 ``[n, block_bytes]`` and returns float32 ``[n, block]``. Products are formed in the order that
the format defines (scale times sub-scale first), so that the values are the same bits as any other faithful reader's.
"""

from __future__ import annotations

import numpy as np

from headrace.base.errors import ModelFileError
from headrace.device.quantization.raw_tensor import F32, Format

_K = 256  # values of a K-quant super-block


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte ``at`` of each block as float32 ``[n, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then the high ones: ``[n, b] -> [n, 2 b]``."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _bit_fields(packed: np.ndarray, shifts: tuple[int, ...], mask: int) -> np.ndarray:
    """``[n, b] -> [n, len(shifts), b]``: the field at each shift."""
    return (packed[:, None, :] >> np.array(shifts, dtype=np.uint8)[None, :, None]) & np.uint8(mask)


def _decode_f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(np.float16).astype(np.float32)


def _decode_bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 32 bits at byte ``at``, one per value, already in place 4 of the value."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")
    return bits << np.uint8(4)


def _decode_q5_0(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (values.astype(np.float32) - np.float32(16))


def _decode_q5_1(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _decode_q2_k(blocks: np.ndarray) -> np.ndarray:
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    n = len(blocks)
    scale = (_half(blocks, 80) * (scales & 0x0F).astype(np.float32))[:, :, None]
    minimum = (_half(blocks, 82) * (scales >> 4).astype(np.float32))[:, :, None]
    values = _bit_fields(packed.reshape(2 * n, 32), (0, 2, 4, 6), 3).reshape(n, 16, 16)
    return (scale * values.astype(np.float32) - minimum).reshape(n, _K)


def _decode_q3_k(blocks: np.ndarray) -> np.ndarray:
    high, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    n = len(blocks)
    low4 = _nibbles(scales[:, :8])
    top2 = _bit_fields(scales[:, 8:], (0, 2, 4, 6), 3).reshape(n, 16)
    scale = (low4 | (top2 << np.uint8(4))).astype(np.float32) - np.float32(32)
    low = _bit_fields(packed.reshape(2 * n, 32), (0, 2, 4, 6), 3).reshape(n, _K)
    absent = _bit_fields(high, tuple(range(8)), 1).reshape(n, _K) ^ np.uint8(1)
    values = low.astype(np.float32) - np.float32(4) * absent.astype(np.float32)
    return ((_half(blocks, 108) * scale)[:, :, None] * values.reshape(n, 16, 16)).reshape(n, _K)


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight 6-bit scales and minima that Q4_K and Q5_K keep in 12 bytes, as float32 ``[n, 8]`` each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([a & 0x3F, (c & 0x0F) | ((a >> 6) << np.uint8(4))], axis=1)
    minimum = np.concatenate([b & 0x3F, (c >> 4) | ((b >> 6) << np.uint8(4))], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _decode_k_with_minimum(blocks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Q4_K and Q5_K: ``values`` is uint8 ``[n, 256]`` in order."""
    n = len(blocks)
    scale, minimum = _six_bit_scales(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
    grouped = values.reshape(n, 8, 32).astype(np.float32)
    return (scale[:, :, None] * grouped - minimum[:, :, None]).reshape(n, _K)


def _decode_q4_k(blocks: np.ndarray) -> np.ndarray:
    return _decode_k_with_minimum(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, _K))


def _decode_q5_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, _K)
    high = _bit_fields(blocks[:, 16:48], tuple(range(8)), 1).reshape(-1, _K)
    return _decode_k_with_minimum(blocks, low | (high << np.uint8(4)))


def _decode_q6_k(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, _K)
    high = _bit_fields(blocks[:, 128:192].reshape(2 * n, 32), (0, 2, 4, 6), 3).reshape(n, _K)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    return (scale[:, :, None] * values.reshape(n, 16, 16)).reshape(n, _K)


F16 = Format("F16", 1, 2, _decode_f16)
BF16 = Format("BF16", 1, 2, _decode_bf16)
Q8_0 = Format("Q8_0", 32, 34, _decode_q8_0)
Q4_0 = Format("Q4_0", 32, 18, _decode_q4_0)
Q4_1 = Format("Q4_1", 32, 20, _decode_q4_1)
Q5_0 = Format("Q5_0", 32, 22, _decode_q5_0)
Q5_1 = Format("Q5_1", 32, 24, _decode_q5_1)
Q2_K = Format("Q2_K", _K, 84, _decode_q2_k)
Q3_K = Format("Q3_K", _K, 110, _decode_q3_k)
Q4_K = Format("Q4_K", _K, 144, _decode_q4_k)
Q5_K = Format("Q5_K", _K, 176, _decode_q5_k)
Q6_K = Format("Q6_K", _K, 210, _decode_q6_k)

FORMATS = {f.name: f for f in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)}


def format_by_name(name: str) -> Format:
    """Return the format that a file calls ``name``.

    Raises:
        ModelFileError: not supported; the message lists what is.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ModelFileError(f"number format {name} is not supported; supported: {', '.join(FORMATS)}") from None
