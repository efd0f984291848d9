"""Same request, same tokens, whatever runs beside it and however the work is cut.

Each variant of the engine answers the same requests as a plain engine does, one request at a time, without a prefix
cache, in whole prompts. On native kernels tokens and log-probabilities are equal bit for bit; the PyTorch reference ops
promise equal tokens outside near ties and log-probabilities within a tolerance.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.core.make_client import ClientKind, make_client
from headrace.device.platform.hardware import detect_hardware
from headrace.entrypoints.async_engine import make_async_llm
from headrace.entrypoints.engine_config import load_engine_config
from headrace.messages.request_output import CompletionOutput
from headrace.messages.sampling_params import RequestOutputKind

MAX_LEN = 512
NUM_MATES = 16
TOLERANCE = 1e-4
NEAR_TIE = 1e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Requests = list[tuple[list[int], SamplingParams]]


def make_requests(num_tokens: int) -> Requests:
    """Greedy and seeded requests, short and long, with penalties and logprobs; two share a prefix."""
    rng = random.Random(20)
    prefix = [rng.randrange(300, 40000) for _ in range(70)]
    prompts = [
        [rng.randrange(300, 40000) for _ in range(9)],
        prefix + [rng.randrange(300, 40000) for _ in range(60)],
        prefix + [rng.randrange(300, 40000) for _ in range(3)],
        [rng.randrange(300, 40000) for _ in range(48)],
    ]
    common: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.0, prompt_logprobs=0, **common),
        SamplingParams(temperature=0.8, seed=11, top_p=0.9, frequency_penalty=0.5, **common),
        SamplingParams(temperature=1.2, seed=7, top_k=50, min_p=0.02, repetition_penalty=1.1, **common),
    ]
    return list(zip(prompts, params, strict=True))


def make_mates() -> Requests:
    """Other people's requests: mixed lengths, sampled without a seed."""
    rng = random.Random(99)
    return [
        (
            [rng.randrange(300, 40000) for _ in range(rng.randrange(1, 120))],
            SamplingParams(max_tokens=rng.randrange(1, 24)),
        )
        for _ in range(NUM_MATES)
    ]


def run(gguf: Path, requests: Requests, *, batches: int = 1, **settings: Any) -> list[list[RequestOutput]]:
    """Answers to ``requests``, ``batches`` times over in one engine."""
    with LLM(str(gguf), max_model_len=MAX_LEN, **settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [p for _, p in requests]
        return [llm.generate(prompts, params, use_tqdm=False) for _ in range(batches)]


def run_alone(gguf: Path, requests: Requests, **settings: Any) -> list[RequestOutput]:
    """The plain engine: one request at a time, one step in flight, no cache, whole prompts."""
    plain = {"enable_prefix_caching": False, "pipeline_depth": 1, "max_num_batched_tokens": 1024} | settings
    with LLM(str(gguf), max_model_len=MAX_LEN, **plain) as llm:
        return [llm.generate([{"prompt_token_ids": ids}], p, use_tqdm=False)[0] for ids, p in requests]


def numbers(answer: CompletionOutput) -> list[list[tuple[int, float]]]:
    """Every log-probability of an answer, position by position."""
    assert answer.logprobs is not None
    return [[(token_id, entry.logprob) for token_id, entry in position.items()] for position in answer.logprobs]


def prompt_numbers(output: RequestOutput) -> list[list[tuple[int, float]]]:
    """Every prompt log-probability."""
    entries = output.prompt_logprobs or []
    return [[(token_id, entry.logprob) for token_id, entry in (position or {}).items()] for position in entries]


def check_bitwise(expected: list[RequestOutput], got: list[RequestOutput]) -> None:
    """Tokens and numbers are the same bits."""
    for want, have in zip(expected, got, strict=False):
        assert have.outputs[0].token_ids == want.outputs[0].token_ids
        assert numbers(have.outputs[0]) == numbers(want.outputs[0])
        assert prompt_numbers(have) == prompt_numbers(want)


def check_close(expected: list[RequestOutput], got: list[RequestOutput]) -> None:
    """Tokens are equal up to a near tie and numbers within the tolerance up to there."""
    for want, have in zip(expected, got, strict=False):
        for ours, theirs in zip(prompt_numbers(have), prompt_numbers(want), strict=True):
            for (_, a), (_, b) in zip(ours, theirs, strict=True):
                assert abs(a - b) < TOLERANCE
        pairs = zip(have.outputs[0].token_ids, want.outputs[0].token_ids, numbers(have.outputs[0]), strict=True)
        for (token, reference, ours), theirs in zip(pairs, numbers(want.outputs[0]), strict=True):
            best = [value for _, value in theirs[1:3]]
            if token != reference:
                assert abs(best[0] - best[-1]) < NEAR_TIE or theirs[0][1] < best[0]
                break
            for (token_id, a), (other_id, b) in zip(ours, theirs, strict=True):
                assert token_id != other_id or abs(a - b) < TOLERANCE


VARIANTS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    "chunks of 2048": {"max_num_batched_tokens": 2048},
    "no prefix cache": {"enable_prefix_caching": False},
    "depth 1": {"pipeline_depth": 1},
    "depth 3": {"pipeline_depth": 3},
    "priority policy": {"scheduling_policy": "priority"},
    "few blocks": {"num_kv_blocks": 34, "max_num_batched_tokens": 64, "max_num_seqs": 64},
    "few blocks, depth 1, priority": {
        "num_kv_blocks": 34,
        "pipeline_depth": 1,
        "scheduling_policy": "priority",
    },
    "eager": {"enforce_eager": True},
    "one thread": {"num_threads": 1},
}

native = pytest.mark.skipif(not detect_hardware().native_ops, reason="the native kernels are not built")


@pytest.fixture(scope="module", params=["exact", "int8"])
def native_baseline(request: pytest.FixtureRequest, smollm2_gguf: Path) -> tuple[str, list[RequestOutput]]:
    """Plain answers of the native kernels, by kind of activations."""
    return request.param, run_alone(smollm2_gguf, make_requests(24), activations=request.param, ops="native")


@native
@pytest.mark.parametrize("variant", VARIANTS)
def test_native_answers_are_the_same_bits(
    variant: str, native_baseline: tuple[str, list[RequestOutput]], smollm2_gguf: Path
) -> None:
    activations, expected = native_baseline
    settings = VARIANTS[variant] | {"activations": activations, "ops": "native"}
    requests = make_requests(24)
    cold, warm = run(smollm2_gguf, requests + make_mates(), batches=2, **settings)
    check_bitwise(expected, cold)
    check_bitwise(expected, warm)


@native
@pytest.mark.parametrize("kind", ["inproc", "process"])
async def test_both_clients_give_the_same_bits(
    kind: ClientKind, native_baseline: tuple[str, list[RequestOutput]], smollm2_gguf: Path
) -> None:
    activations, expected = native_baseline
    settings = {"model": str(smollm2_gguf), "max_model_len": MAX_LEN, "activations": activations, "ops": "native"}
    config = load_engine_config(settings)
    client = make_client(config, kind)
    engine = make_async_llm(config, client)
    try:
        await engine.start()
        requests = make_requests(24) + make_mates()
        streams = await engine.add_requests(
            [{"prompt_token_ids": ids} for ids, _ in requests],
            [msgspec.structs.replace(p, output_kind=RequestOutputKind.FINAL_ONLY) for _, p in requests],
        )
        got = [[output async for output in stream][-1] for stream in streams]
    finally:
        await engine.shutdown()
    check_bitwise(expected, got)


def test_reference_answers_are_the_same_within_the_tolerance(smollm2_gguf: Path) -> None:
    requests = make_requests(8)
    expected = run_alone(smollm2_gguf, requests, ops="reference", dtype="float32")
    settings: dict[str, Any] = {
        "ops": "reference",
        "dtype": "float32",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 64,
    }
    cold, warm = run(smollm2_gguf, requests + make_mates()[:4], batches=2, num_kv_blocks=34, **settings)
    check_close(expected, cold)
    check_close(expected, warm)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_answers_hold_in_every_variant(variant: str, smollm2_gguf: Path) -> None:
    requests = make_requests(12)
    expected = run_alone(smollm2_gguf, requests, ops="reference", dtype="float32")
    settings = VARIANTS[variant] | {"ops": "reference", "dtype": "float32"}
    cold, warm = run(smollm2_gguf, requests + make_mates(), batches=2, **settings)
    check_close(expected, cold)
    check_close(expected, warm)
