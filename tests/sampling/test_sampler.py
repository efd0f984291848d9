"""The sampler against an obvious per-row twin, and its independence of batch mates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.device.sampling.kernels import Draw, NumpySampling, SamplingKernels, WantedLogprobs
from headrace.device.sampling.noise import hash_tokens, make_key, make_noise
from headrace.device.sampling.rows import SamplingRows
from headrace.device.sampling.sampler import NO_TOKEN, HeadOutput, Sampler, SamplerOutput, SamplingMetadata
from headrace.messages.runner_output import TokenLogprobs
from headrace.messages.sampling_params import SamplingParams
from headrace.messages.scheduler_output import NewRequest

VOCAB = 613
EOS = 5


class Bench:
    """Rows with random histories."""

    def __init__(
        self, max_rows: int = 16, vocab: int = VOCAB, width: int = 64, kernels: SamplingKernels | None = None
    ) -> None:
        self.rows = SamplingRows(max_rows, vocab)
        self.token_ids = np.zeros((max_rows, width), dtype=np.int32)
        self.num_prompt = np.zeros(max_rows, dtype=np.int32)
        self.sampler = Sampler(self.rows, self.token_ids, self.num_prompt, kernels or NumpySampling())
        self.requests: dict[int, NewRequest] = {}

    def add(self, row: int, tokens: list[int], num_prompt: int, bad_words: Any = (), **params: Any) -> None:
        request = NewRequest(
            request_id=f"r{row}",
            token_ids=tokens,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=0,
            block_ids=([],),
            sampling=SamplingParams(**{"seed": row, "max_tokens": 64, **params}),
            eos_token_ids=(EOS,),
            bad_words_token_ids=bad_words,
        )
        self.requests[row] = request
        self.token_ids[row, : len(tokens)] = tokens
        self.num_prompt[row] = num_prompt
        self.rows.set_row(row, request)

    def sample(self, logits: np.ndarray, order: list[int], masks: dict[int, np.ndarray] | None = None) -> SamplerOutput:
        positions = [len(self.requests[r].token_ids) for r in order]
        return self.sampler.sample(HeadOutput.of_logits(logits), SamplingMetadata(order, positions, masks or {}))


def twin(logits: np.ndarray, request: NewRequest, allowed_bits: np.ndarray | None) -> int | None:
    """One row in plain Python; ``None`` when nothing may be chosen."""
    p = request.sampling
    x = [np.float32(v) for v in logits]
    vocab = len(x)
    prompt = request.token_ids[: request.num_prompt_tokens]
    output = request.token_ids[request.num_prompt_tokens :]
    forbidden: set[int] = set()
    if allowed_bits is not None:
        forbidden |= {i for i in range(vocab) if not allowed_bits[i]}
    if p.allowed_token_ids is not None:
        forbidden |= set(range(vocab)) - set(p.allowed_token_ids)
    for i, bias in (p.logit_bias or {}).items():
        x[i] += np.float32(bias)
    if len(output) < p.min_tokens:
        forbidden |= set(request.eos_token_ids) | set(p.stop_token_ids)
    for i in set(prompt) | set(output):
        factor = np.float32(p.repetition_penalty)
        x[i] = x[i] / factor if x[i] > 0 else x[i] * factor
    for i in set(output):
        count = np.float32(output.count(i))
        x[i] -= np.float32(p.frequency_penalty) * count + np.float32(p.presence_penalty)
    for word in request.bad_words_token_ids:
        n = len(word) - 1
        if n == 0 or tuple(output[-n:]) == word[:-1]:
            forbidden.add(word[-1])
    alive = [i for i in range(vocab) if i not in forbidden]
    if not alive:
        return None
    best = min(alive, key=lambda i: (-x[i], i))
    if p.temperature < 1e-5:
        return best
    t = np.float32(p.temperature)
    scaled = {i: np.float32(x[i] - x[best]) / t for i in alive}
    ranked = sorted(alive, key=lambda i: (-scaled[i], i))
    if p.min_p > 0:
        ranked = [i for i in ranked if scaled[i] >= np.float32(math.log(p.min_p))]
    if p.top_k > 0:
        ranked = ranked[: p.top_k]
    if p.top_p < 1:
        weights = [float(np.exp(scaled[i])) for i in ranked]
        total, mass, kept = math.fsum(weights), 0.0, []
        for i, w in zip(ranked, weights, strict=True):
            kept.append(i)
            mass += w
            if mass >= p.top_p * total:
                break
        ranked = kept
    ids = np.array(ranked)
    noise = make_noise(hash_tokens(make_key(p.seed or 0, len(request.token_ids)), ids))
    scores = [(-(float(scaled[i]) + g), i) for i, g in zip(ids.tolist(), noise.tolist(), strict=True)]
    return min(scores)[1]


def random_params(rng: np.random.Generator) -> dict[str, Any]:
    def maybe(share: float) -> bool:
        return bool(rng.random() < share)

    params: dict[str, Any] = {"temperature": 0.0 if maybe(0.3) else float(rng.uniform(0.05, 2.0))}
    params["seed"] = int(rng.integers(-(1 << 63), 1 << 63))
    if maybe(0.4):
        params["top_k"] = int(rng.choice([1, 2, 5, 50, VOCAB, VOCAB + 9]))
    if maybe(0.4):
        params["top_p"] = float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999]))
    if maybe(0.3):
        params["min_p"] = float(rng.choice([0.01, 0.3, 1.0]))
    if maybe(0.3):
        params["repetition_penalty"] = float(rng.uniform(0.5, 2))
    if maybe(0.3):
        params["frequency_penalty"] = float(rng.uniform(-2, 2))
    if maybe(0.3):
        params["presence_penalty"] = float(rng.uniform(-2, 2))
    if maybe(0.3):
        params["min_tokens"] = int(rng.integers(0, 20))
        params["stop_token_ids"] = (int(rng.integers(VOCAB)), VOCAB + 3)
    if maybe(0.3):
        params["logit_bias"] = {int(i): float(rng.uniform(-100, 100)) for i in rng.integers(0, VOCAB, 5)}
    if maybe(0.2):
        params["allowed_token_ids"] = tuple(rng.choice(VOCAB, 40, replace=False).tolist())
    if maybe(0.3):
        params["logprobs"] = int(rng.choice([0, 1, 5, 20, -1]))
    return params


def fill(bench: Bench, rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Random requests in rows 0..n-1; logits with many ties; masks for some."""
    masks: dict[int, np.ndarray] = {}
    for row in range(num_rows):
        tokens = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        num_prompt = int(rng.integers(1, len(tokens) + 1))
        bad = tuple(tuple(rng.integers(0, VOCAB, int(rng.integers(1, 3))).tolist()) for _ in range(3))
        tail = tuple(tokens[num_prompt:][-2:])
        bad_words = (*bad, (*tail, int(rng.integers(VOCAB)))) if rng.random() < 0.4 else ()
        bench.add(row, tokens, num_prompt, bad_words, **random_params(rng))
        if rng.random() < 0.3:
            masks[row] = rng.integers(-(1 << 31), 1 << 31, (VOCAB + 31) // 32).astype(np.int32)
    logits = (rng.standard_normal((num_rows, VOCAB)) * 4).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])
    return logits, masks


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_slow_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bench = Bench()
    logits, masks = fill(bench, rng, 16)
    before = logits.copy()
    output = bench.sample(logits, list(range(16)), masks)
    assert np.array_equal(logits, before)
    for row in range(16):
        bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little") if row in masks else None
        expected = twin(logits[row], bench.requests[row], bits)
        if expected is None:
            assert output.token_ids[row] == NO_TOKEN and "no token" in output.errors[row]
        else:
            assert output.token_ids[row] == expected and row not in output.errors


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_penalty_that_overflows_takes_the_greatest() -> None:
    bench = Bench()
    bench.add(0, [7, 9], 2, repetition_penalty=1e-40, temperature=1.0, top_p=0.9)
    logits = np.ones((1, VOCAB), dtype=np.float32)
    output = bench.sample(logits, [0])
    assert output.token_ids == [7] and not output.errors


@pytest.mark.parametrize("seed", range(4))
def test_a_row_alone_equals_the_row_in_any_batch(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    bench = Bench()
    logits, masks = fill(bench, rng, 16)
    whole = bench.sample(logits, list(range(16)), masks)
    for size in (1, 3, 7, 16):
        order = rng.permutation(16)[:size].tolist()
        here = {place: masks[row] for place, row in enumerate(order) if row in masks}
        part = bench.sample(logits[order], order, here)
        for place, row in enumerate(order):
            assert part.token_ids[place] == whole.token_ids[row]
            assert part.logprobs.get(place) == whole.logprobs.get(row)
            assert part.errors.get(place) == whole.errors.get(row)


def test_sampling_again_gives_the_same() -> None:
    """Also after going back over steps with penalties: counts follow the position both ways."""
    rng = np.random.default_rng(7)
    bench = Bench()
    bench.add(0, [1, 2, 3], 2, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.3)
    logits = (rng.standard_normal((20, VOCAB)) * 2).astype(np.float32)

    def run(start: int, stop: int) -> list[int]:
        made = []
        for position in range(start, stop):
            meta = SamplingMetadata([0], [position])
            token = int(bench.sampler.sample(HeadOutput.of_logits(logits[position : position + 1]), meta).token_ids[0])
            bench.token_ids[0, position] = token
            made.append(token)
        return made

    first = run(3, 20)
    assert run(10, 20) == first[7:]
    assert run(3, 20) == first
    extras = bench.rows.extras[0]
    assert extras is not None and extras.penalties is not None
    assert np.array_equal(extras.penalties.counts, np.bincount(bench.token_ids[0, 2:19], minlength=VOCAB))


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """Chi-square of 8,000 positions against the softmax."""
    rng = np.random.default_rng(3)
    bench = Bench(vocab=12)
    bench.add(0, [1], 1, temperature=0.8, seed=99)
    logits = rng.standard_normal((1, 12)).astype(np.float32)
    count = 8_000
    counts = np.zeros(12)
    for position in range(count):
        meta = SamplingMetadata([0], [position])
        counts[bench.sampler.sample(HeadOutput.of_logits(logits), meta).token_ids[0]] += 1
    weights = np.exp(logits[0].astype(np.float64) / 0.8)
    expected = weights / weights.sum() * count
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 31.3, chi_square  # 99.9 % of chi-square with 11 degrees of freedom


def test_seeds_and_positions_differ() -> None:
    bench = Bench()
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    drawn = set()
    for seed in range(40):
        bench.add(0, [1], 1, seed=seed)
        drawn.add(int(bench.sample(logits, [0]).token_ids[0]))
    assert len(drawn) > 30


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("plain", [True, False])
def test_non_finite_logits_end_only_their_row(value: float, plain: bool) -> None:
    bench = Bench()
    for row in range(3):
        bench.add(row, [1], 1, temperature=0.0, **({} if plain else {"logprobs": 2, "presence_penalty": 1.0}))
    logits = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
    logits[1, 17] = value
    output = bench.sample(logits, [0, 1, 2])
    assert set(output.errors) == {1} and "not finite" in output.errors[1]
    assert output.token_ids[0] == logits[0].argmax() and output.token_ids[2] == logits[2].argmax()
    assert output.token_ids[1] == NO_TOKEN


def test_an_exception_ends_only_its_row() -> None:
    bench = Bench()
    bench.add(0, [1], 1, temperature=0.0)
    bench.add(1, [1], 1, temperature=0.0)
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    output = bench.sample(logits, [0, 1], {1: np.zeros(2, dtype=np.int32)})
    assert output.token_ids[0] == 0
    assert output.errors[1].startswith("sampling failed")


class Choosy(NumpySampling):
    """Refuses one row, whoever is with it."""

    def __init__(self, peak: float) -> None:
        self.peak = peak

    def draw(self, rows: Sequence[Draw]) -> list[int]:
        if any(row.peak == self.peak for row in rows):
            raise MemoryError("no room")
        return super().draw(rows)

    def token_logprobs(self, rows: Sequence[WantedLogprobs]) -> list[TokenLogprobs]:
        if any(row.row.max() == self.peak for row in rows):
            raise MemoryError("no room")
        return super().token_logprobs(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_work_on_many_rows_fails_for_the_row_that_causes_it(temperature: float) -> None:
    logits = np.random.default_rng(3).standard_normal((4, VOCAB)).astype(np.float32)
    logits[2, 5] = 50.0
    outputs = []
    for kernels in (NumpySampling(), Choosy(50.0)):
        bench = Bench(kernels=kernels)
        for row in range(4):
            bench.add(row, [1], 1, temperature=temperature, logprobs=1, **({"min_tokens": 3} if row == 3 else {}))
        outputs.append(bench.sample(logits, [0, 1, 2, 3]))
    fine, output = outputs
    assert not fine.errors
    assert output.errors == {2: "sampling failed: MemoryError: no room"}
    assert output.token_ids == [*fine.token_ids[:2], NO_TOKEN, fine.token_ids[3]]
    assert output.logprobs == {place: entry for place, entry in fine.logprobs.items() if place != 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_without_overlap_are_an_error(temperature: float) -> None:
    bench = Bench()
    bench.add(0, [1], 1, bad_words=((9,),), allowed_token_ids=(9,), temperature=temperature)
    bench.add(1, [1], 1, min_tokens=3, allowed_token_ids=(EOS,), temperature=temperature)
    bench.add(2, [1], 1, allowed_token_ids=(9,), logit_bias={9: -100.0}, temperature=temperature)
    output = bench.sample(np.zeros((3, VOCAB), dtype=np.float32), [0, 1, 2])
    assert set(output.errors) == {0, 1}
    assert output.token_ids[2] == 9


def test_low_temperatures_do_not_overflow() -> None:
    bench = Bench()
    logits = (np.random.default_rng(0).standard_normal((4, VOCAB)) * 50).astype(np.float32)
    for row, temperature in enumerate((1e-300, 1e-30, 2e-5, 1e-3)):
        bench.add(row, [1], 1, temperature=temperature)
    assert np.array_equal(bench.sample(logits, [0, 1, 2, 3]).token_ids, logits.argmax(axis=1))


def test_logprobs_are_raw_with_ranks() -> None:
    rng = np.random.default_rng(5)
    bench = Bench()
    bench.add(0, [1, 7], 1, logprobs=5, temperature=1.5, logit_bias={3: 60.0})
    bench.add(1, [1, 7], 1, logprobs=-1, temperature=0.0)
    bench.add(2, [1, 7], 1, logprobs=0, temperature=0.0)
    logits = np.round(rng.standard_normal((3, VOCAB)) * 3).astype(np.float32)
    output = bench.sample(logits, [0, 1, 2])
    for row, width in ((0, 5), (1, VOCAB), (2, 0)):
        x = logits[row].astype(np.float64)
        reference = x - x.max() - np.log(np.exp(x - x.max()).sum())
        order = sorted(range(VOCAB), key=lambda i: (-x[i], i))
        entry, token = output.logprobs[row], int(output.token_ids[row])
        assert entry.token_ids == [token, *order[:width]]
        assert np.allclose(entry.logprobs, reference[entry.token_ids], atol=1e-5)
        assert entry.rank == order.index(token) + 1
    assert output.token_ids[0] == 3
