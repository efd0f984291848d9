"""Rows of a real runner change hands all the time: nothing of one request may stick to the next."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.base.progress import ProgressWord
from headrace.core.build import build_core
from headrace.core.engine_core import EngineCore
from headrace.core.make_client import EXECUTORS
from headrace.device.platform.hardware import detect_hardware
from headrace.entrypoints.engine_config import load_engine_config
from headrace.messages.requests import EngineCoreRequest
from headrace.testing.requests import make_request
from tests.device.families import SIZES, make_hf_model, save_hf_model

VOCAB = SIZES["vocab_size"]
NUM_REQUESTS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_model(make_hf_model("llama"), tmp_path_factory.mktemp("tiny"))


def make_core(folder: Path, depth: int) -> EngineCore:
    settings = {
        "model": str(folder),
        "dtype": "float32",
        "ops": "native",
        "max_model_len": 64,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 24,
        "pipeline_depth": depth,
        "num_kv_blocks": 41,
        "num_threads": 1,
    }
    return build_core(load_engine_config(settings), EXECUTORS["uniproc"], {}, ProgressWord())


def draw_request(random: Random, number: int) -> EngineCoreRequest:
    """Any mix of what is kept per row: penalties, masks, words, seeds, logprobs."""
    ids = random.sample(range(3, VOCAB), 12)
    max_tokens = random.randrange(1, 16)
    sampling: dict[str, Any] = {"temperature": random.choice([0.0, 0.8, 1.5])}
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "presence_penalty": -1.0},
        {"logit_bias": {ids[0]: 8.0, ids[1]: -100.0}},
        {"allowed_token_ids": tuple(sorted(ids))},
        {"top_k": 4},
        {"top_p": 0.6, "min_p": 0.02},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"min_tokens": max_tokens // 2},
        {"stop_token_ids": (ids[2], ids[3])},
    ]
    for wish in random.sample(wishes, random.randrange(4)):
        sampling |= wish
    words = ((ids[4],), (ids[5], ids[6])) if random.random() < 0.3 else ()
    return make_request(
        f"r{number}",
        [random.randrange(3, VOCAB) for _ in range(random.randrange(1, 30))],
        max_tokens,
        seed=random.randrange(1 << 40),
        sampling=sampling,
        bad_words_token_ids=words,
        eos_token_ids=(2,),
    )


def run(core: EngineCore, requests: list[EngineCoreRequest], random: Random | None = None) -> dict[str, Any]:
    """Answers by request: tokens, logprobs and how it ended; with ``random`` they come and leave at any time."""
    waiting, answers = list(requests), {}
    while waiting or core.has_work:
        for _ in range(len(waiting) if random is None else random.randrange(3)):
            if waiting:
                request = waiting.pop(0)
                answers[request.request_id] = ([], [], [])
                core.add_request(request)
        if random is not None and random.random() < 0.05:
            core.abort_soon([f"r{random.randrange(len(requests))}"])
        for outputs in core.step().values():
            for output in outputs.outputs:
                tokens, logprobs, end = answers[output.request_id]
                tokens += output.new_token_ids
                logprobs += output.logprobs or []
                end += [output.finish_reason] if output.finish_reason else []
        core.scheduler.check_invariants()
    return answers


@pytest.mark.slow
@pytest.mark.skipif(not detect_hardware().native_ops, reason="the native kernels are not built")
@pytest.mark.parametrize("depth", [1, 2])
def test_b029_mixed_batches_equal_solo_runs(folder: Path, depth: int) -> None:
    random = Random(29)
    requests = [draw_request(random, number) for number in range(NUM_REQUESTS)]
    core = make_core(folder, depth)
    try:
        crowded = run(core, requests, random)
        num_aborted = 0
        for request in requests:
            assert core.scheduler.reset_prefix_cache(False)
            alone = run(core, [request])[request.request_id]
            mixed = crowded[request.request_id]
            if [reason.value for reason in mixed[2]] == ["abort"]:
                num_aborted += 1
                assert mixed[0] == alone[0][: len(mixed[0])]
            else:
                assert mixed == alone, request
        assert 0 < num_aborted < NUM_REQUESTS // 2
        pool = core.scheduler.kv.pool
        assert pool.num_free == pool.num_usable
    finally:
        core.shutdown()
