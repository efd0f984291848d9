"""The native draw gives the very tokens of the one that is written down in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.device.ops.cpu.ops import available_isas
from headrace.device.sampling.draw import draw_token
from headrace.device.sampling.noise import hash_tokens, make_key, make_noise
from tests.ops_cpu.conftest import make_ops


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("width", [1, 7, 255, 4000])
def test_the_same_token(isa, spread, width) -> None:
    rng = np.random.default_rng(width)
    ops = make_ops(1, isa=isa)
    for position in range(40):
        x = (rng.standard_normal(width) * spread).astype(np.float32)
        x[rng.random(width) < 0.3] = -np.inf
        x[rng.integers(width)] = 0.0
        seed = int(rng.integers(-(1 << 63), 1 << 63))
        scores = x.astype(np.float64) + make_noise(hash_tokens(make_key(seed, position), np.arange(width)))
        assert ops.draw_token(x, None, seed, position) == int(scores.argmax())


def test_large_rows_and_chosen_ids() -> None:
    rng = np.random.default_rng(0)
    ops = make_ops()
    for position in range(20):
        x = (rng.standard_normal(49152) * 2).astype(np.float32)
        assert ops.draw_token(x, None, 5, position) == draw_token(x, None, 5, position)
        ids = np.sort(rng.choice(49152, 40, replace=False))
        assert ops.draw_token(x, ids, 5, position) == draw_token(x, ids, 5, position)
