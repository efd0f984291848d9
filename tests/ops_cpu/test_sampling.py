"""Native work on rows of logits gives the very bits of the NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.device.ops.cpu.ops import available_isas
from headrace.device.sampling.kernels import Draw, NumpySampling, Penalties, Shape, WantedLogprobs
from headrace.device.sampling.noise import hash_tokens, make_key, make_noise
from tests.ops_cpu.conftest import make_ops

TWIN = NumpySampling()
WIDTHS = [1, 7, 64, 255, 4000]


def _row(rng: np.random.Generator, width: int, spread: float, forbidden: float = 0.2) -> np.ndarray:
    """Logits with ties, some of them forbidden, never all."""
    x = (rng.standard_normal(width) * spread).astype(np.float32)
    x[rng.random(width) < 0.2] = np.float32(spread / 2)
    x[rng.random(width) < forbidden] = -np.inf
    x[rng.integers(width)] = np.float32(spread)
    return x


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("part", ["bitmask", "penalties", "draw", "logprobs"])
def test_each_part_equals_its_twin(isa, width, part) -> None:
    rng = np.random.default_rng(width)
    native = make_ops(1, isa=isa).sampling
    for trial in range(60):
        x = _row(rng, width, float(rng.choice([0.0, 0.01, 1.0, 4.0, 30.0])), 0.0 if part == "logprobs" else 0.2)
        got, want = x.copy(), x.copy()
        if part == "bitmask":
            words = rng.integers(-(1 << 31), 1 << 31, -(-width // 32) + trial % 2).astype(np.int32)
            words[rng.random(len(words)) < 0.5] = -1
            native.apply_bitmask(got, words)
            TWIN.apply_bitmask(want, words)
        elif part == "penalties":
            counts = (rng.random(width) < 0.1) * rng.integers(1, 9, width).astype(np.int32)
            seen = rng.random(width) < rng.choice([0.0, 0.3])
            factors = rng.choice([0.0, 0.7], 2)
            by = Penalties(float(rng.choice([1.0, 1.3, 0.6])), float(factors[0]), float(factors[1]))
            native.apply_penalties(got, seen, counts.astype(np.int32), by)
            TWIN.apply_penalties(want, seen, counts.astype(np.int32), by)
        elif part == "draw":
            min_p, top_p = (
                float(rng.choice([0.0, 0.01, 0.3, 1.0])),
                float(rng.choice([1.0, 1e-6, 0.1, 0.5, 0.9, 0.999])),
            )
            top_k = int(rng.choice([0, 1, 2, 5, 50, 1000, 9999]))
            temperature, seed = float(np.float32(rng.uniform(0.05, 2))), int(rng.integers(-(1 << 63), 1 << 63))
            asked = (float(x.max()), Shape(temperature, min_p, top_k, top_p), seed, trial)
            assert native.draw([Draw(got, *asked)]) == TWIN.draw([Draw(want, *asked)]), asked
        else:
            token, best = int(rng.integers(width)), int(rng.choice([0, 1, 3, 20, width, -1]))
            asked = [WantedLogprobs(x, token, best)]
            assert native.token_logprobs(asked) == TWIN.token_logprobs(asked)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_side_by_side_give_what_each_gives_alone(threads) -> None:
    rng = np.random.default_rng(5)
    native = make_ops(threads).sampling
    for count in (1, 2, 3, 8, 40):
        rows = [_row(rng, 3000, float(rng.choice([0.01, 1.0, 4.0]))) for _ in range(count)]
        before = [row.copy() for row in rows]
        hows = [Shape(0.8, *rest) for rest in ((0.0, 0, 1.0), (0.05, 0, 1.0), (0.0, 50, 0.9), (0.0, 0, 0.9))]
        draws = [Draw(row, float(row.max()), hows[i % 4], 7 + i, 100 + i) for i, row in enumerate(rows)]
        assert native.draw(draws) == [token for draw in draws for token in TWIN.draw([draw])]
        wanted = [WantedLogprobs(row, int(np.argmax(row)), i % 5) for i, row in enumerate(rows)]
        assert native.token_logprobs(wanted) == TWIN.token_logprobs(wanted)
        assert all(np.array_equal(a, b) for a, b in zip(rows, before, strict=True))


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 30.0])
def test_a_draw_takes_the_greatest_sum_of_logit_and_noise(spread) -> None:
    rng = np.random.default_rng(1)
    native = make_ops().sampling
    for width in (*WIDTHS, 49152):
        x = _row(rng, width, spread)
        seed = int(rng.integers(-(1 << 63), 1 << 63))
        scaled = x - x.max()
        scores = scaled.astype(np.float64) + make_noise(hash_tokens(make_key(seed, 3), np.arange(width)))
        drawn = native.draw([Draw(x, float(x.max()), Shape(1.0, 0.0, 0, 1.0), seed, 3)])
        assert drawn == [int(scores.argmax())]


def test_log_probabilities_are_those_of_a_softmax() -> None:
    rng = np.random.default_rng(2)
    row = (rng.standard_normal(49152) * 4).astype(np.float32)
    wide = row.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = np.lexsort((np.arange(len(row)), -wide))
    (entry,) = make_ops().sampling.token_logprobs([WantedLogprobs(row, 77, 9)])
    assert entry.token_ids == [77, *order[:9].tolist()]
    assert np.allclose(entry.logprobs, expected[entry.token_ids], atol=2e-6)
    assert entry.rank == 1 + int(np.flatnonzero(order == 77)[0])


def test_what_does_not_fit_is_an_error() -> None:
    native, x = make_ops().sampling, np.zeros(65, dtype=np.float32)
    with pytest.raises(ValueError, match="cannot cover"):
        native.apply_bitmask(x, np.zeros(2, dtype=np.int32))
    with pytest.raises(ValueError, match="one count per token"):
        native.apply_penalties(x, np.zeros(64, dtype=bool), np.zeros(65, dtype=np.int32), Penalties(1.1, 0.0, 0.0))
    with pytest.raises(ValueError, match="no such token"):
        native.token_logprobs([WantedLogprobs(x, 0, 0), WantedLogprobs(x, 65, 0)])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_that_fails_among_others_is_an_error_and_no_death(threads) -> None:
    rng = np.random.default_rng(7)
    rows = [rng.standard_normal(4096).astype(np.float32) for _ in range(16)]
    rows[3][5] = rows[12][5] = np.nan
    sampling, how = make_ops(threads=threads).sampling, Shape(1.0, 0.0, 0, 0.9)
    draws = [Draw(x, float(np.nanmax(x)), how, 1, 1) for x in rows]
    for _ in range(10):
        with pytest.raises(ValueError, match="not finite"):
            sampling.draw(draws)
    assert len(sampling.draw([draw for i, draw in enumerate(draws) if i not in (3, 12)])) == 14
