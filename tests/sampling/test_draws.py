"""Noise, draws and filters against definitions written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.device.sampling.draw import draw_token
from headrace.device.sampling.filters import select_top_k, select_top_p, surviving_ids, top_k_ids
from headrace.device.sampling.noise import NOISE_MAX, hash_tokens, make_key, make_noise, min_hash_for

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def mix32(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & M32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & M32
    return h ^ (h >> 16)


def scalar_log(x: float) -> float:
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = m + m, e - 1
    f = (m - 1) / (m + 1)
    z = f * f
    p = 1 / 21
    for n in range(19, 0, -2):
        p = p * z + 1 / n
    return e * 0.6931471805599453 + (f + f) * p


@pytest.mark.parametrize("seed", [0, 1, -1, 123456789, -(1 << 63), (1 << 63) - 1])
def test_noise_has_the_documented_bits(seed: int) -> None:
    ids = np.array([0, 1, 2, 77, 49151, 151935])
    for position in (0, 1, 8191):
        key = mix64(mix64(seed & M64) ^ position)
        low, high = key & M32, key >> 32
        hashes = [mix32(mix32(t ^ low) ^ high) for t in ids.tolist()]
        got = hash_tokens(make_key(seed, position), ids)
        assert got.tolist() == hashes
        expected = [-scalar_log(-scalar_log((h + 0.5) / 2**32)) for h in hashes]
        assert make_noise(got).tolist() == expected


def test_noise_is_gumbel() -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    u = (hashes.astype(np.float64) + 0.5) / 2**32
    assert np.allclose(make_noise(hashes), -np.log(-np.log(u)), rtol=1e-12, atol=1e-12)
    edges = make_noise(np.array([0, M32], dtype=np.uint32))
    assert -3.2 < edges[0] < -3 and 22 < edges[1] < NOISE_MAX


def test_hash_bound_never_hides_a_winner() -> None:
    hashes = np.unique(np.random.default_rng(1).integers(0, 1 << 32, 20_000, dtype=np.uint64)).astype(np.uint32)
    noise = make_noise(hashes)
    for needed in (-4.0, -3.0, -1.0, 0.0, 2.5, 8.0, 20.0, 22.8):
        assert noise[hashes < min_hash_for(needed)].max(initial=-np.inf) < needed


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 30.0])
def test_skipping_losers_changes_no_draw(spread: float) -> None:
    rng = np.random.default_rng(2)
    ids = np.arange(5000)
    for position in range(40):
        x = (rng.standard_normal(5000) * spread).astype(np.float32)
        x[rng.random(5000) < 0.2] = -np.inf
        x -= x.max()
        scores = x.astype(np.float64) + make_noise(hash_tokens(make_key(11, position), ids))
        assert draw_token(x, ids, 11, position) == draw_token(x, None, 11, position) == int(scores.argmax())
        some = np.flatnonzero(x > -4)
        assert draw_token(x, some, 11, position) == some[scores[some].argmax()]


@pytest.mark.parametrize("vocab", [3, 64, 65, 1000, 5003])
def test_filters_equal_a_full_sort(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(30):
        x = np.round(rng.standard_normal(vocab) * 3, int(rng.integers(0, 3))).astype(np.float32)
        x[rng.random(vocab) < rng.choice([0.0, 0.3, 0.95])] = -np.inf
        x[rng.integers(vocab)] = 12.0
        x -= x.max()
        ranked = [i for i in sorted(range(vocab), key=lambda i: (-x[i], i)) if x[i] > -np.inf]
        for k in (1, 2, 7, 40, vocab - 1, vocab):
            assert top_k_ids(x, k).tolist() == ranked[:k]
            assert select_top_k(x, k).tolist() == sorted(ranked[:k])
        top_p = float(rng.choice([1e-9, 0.3, 0.9, 0.99999]))
        weights = np.exp(x[ranked]).astype(np.float64)
        kept = int(np.searchsorted(np.cumsum(weights), top_p * np.exp(x).astype(np.float64).sum())) + 1
        assert select_top_p(x, top_p).tolist() == sorted(ranked[:kept])


def test_no_filter_is_none_and_one_always_survives() -> None:
    x = np.array([0.0, -1.0, -np.inf], dtype=np.float32)
    assert surviving_ids(x, 0.0, 0, 1.0) is None
    assert surviving_ids(x, 0.0, 3, 1.0) is None
    got = surviving_ids(x, 1.0, 0, 1e-12)
    assert got is not None and got.tolist() == [0]
