"""Field cases that only a real model can show, each named by its id. See ``docs/field-cases.md`` for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 16
COUNTING = "Count up: one, two, three,"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": BLOCK}


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), num_kv_blocks=100, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def plain(smollm2_gguf: Path) -> Iterator[LLM]:
    """Without a prefix cache."""
    with LLM(str(smollm2_gguf), num_kv_blocks=100, enable_prefix_caching=False, **SETTINGS) as made:
        yield made


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def answer(engine: LLM, prompt: Any, params: SamplingParams) -> Any:
    return engine.generate([prompt], params, use_tqdm=False)[0]


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 40000) for _ in range(num_tokens)]


def test_b007_b008_stop_strings_at_every_split(llm: LLM) -> None:
    text = answer(llm, COUNTING, greedy(24)).outputs[0].text
    for start in range(0, 21, 2):
        stop = text[start : start + 3]
        first = text.index(stop)
        for include in (False, True):
            output = answer(llm, COUNTING, greedy(24, stop=stop, include_stop_str_in_output=include)).outputs[0]
            assert output.text == text[: first + len(stop) * include]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_b028_the_first_answer_is_like_all_later_ones(llm: LLM, plain: LLM) -> None:
    prompt = random_prompt(120, 28)
    llm.reset_prefix_cache()
    cold, *warm = [answer(llm, prompt, greedy(24, ignore_eos=True)) for _ in range(4)]
    assert cold.num_cached_tokens == 0
    assert all(one.num_cached_tokens >= BLOCK for one in warm)
    right = answer(plain, prompt, greedy(24, ignore_eos=True)).outputs[0].token_ids
    assert [one.outputs[0].token_ids for one in (cold, *warm)] == [right] * 4


@pytest.mark.parametrize("length", [k * BLOCK + d for k in (1, 3) for d in (-1, 0, 1)])
def test_b032_hits_at_the_borders_of_blocks(llm: LLM, plain: LLM, length: int) -> None:
    prompt = random_prompt(length, 32 + length)
    params = greedy(4, logprobs=0, ignore_eos=True)
    llm.reset_prefix_cache()
    forms = [prompt, prompt, [*prompt, 1000], prompt[:-1]]
    for form in forms:
        mine, right = answer(llm, form, params), answer(plain, form, params)
        assert mine.outputs[0].token_ids == right.outputs[0].token_ids
        assert mine.num_cached_tokens <= len(form) - 1
        for ours, theirs in zip(mine.outputs[0].logprobs, right.outputs[0].logprobs, strict=True):
            assert next(iter(ours.values())).logprob == pytest.approx(next(iter(theirs.values())).logprob, abs=1e-4)


def test_b025_b034_preempted_requests_lose_nothing(smollm2_gguf: Path, plain: LLM) -> None:
    prompts = [random_prompt(30, seed) for seed in range(5)]
    params = [greedy(40, ignore_eos=True, prompt_logprobs=2 if place == 4 else None) for place in range(5)]
    with LLM(str(smollm2_gguf), num_kv_blocks=12, **{**SETTINGS, "max_model_len": 96}) as tight:
        crowded = tight.generate(prompts, params, use_tqdm=False)
    assert any(one.times is not None and one.times.num_preemptions for one in crowded)
    for prompt, own, mine in zip(prompts, params, crowded, strict=True):
        right = answer(plain, prompt, own)
        assert mine.outputs[0].token_ids == right.outputs[0].token_ids
        if own.prompt_logprobs is None:
            continue
        assert len(mine.prompt_logprobs) == 30
        for ours, theirs in zip(mine.prompt_logprobs[1:], right.prompt_logprobs[1:], strict=True):
            assert next(iter(ours.values())).logprob == pytest.approx(next(iter(theirs.values())).logprob, abs=1e-3)


def test_b052_bad_words_in_every_spelling(llm: LLM) -> None:
    text = answer(llm, COUNTING, greedy(16)).outputs[0].text
    word = next(piece.strip(",. ") for piece in text.split() if len(piece.strip(",. ")) > 2)
    kept = answer(llm, COUNTING, greedy(16, bad_words=[word])).outputs[0].text
    assert word in text
    assert word not in kept


def test_b104_markers_of_the_template_are_one_token_each(llm: LLM, goldens: list[dict[str, Any]]) -> None:
    tokenizer = llm.get_tokenizer()
    for marker in ("<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(marker)) == 1
    for golden in goldens:
        text = golden.get("text_prompt") or golden.get("prompt")
        if isinstance(text, str):
            assert tokenizer.encode(text) == golden["prompt_ids"]


def test_b106_tied_embeddings_answer_as_the_reference(llm: LLM, goldens: list[dict[str, Any]]) -> None:
    golden = next(one for one in goldens if len(one["prompt_ids"]) < 40 and not one["near_ties"])
    output = answer(llm, golden["prompt_ids"], greedy(8)).outputs[0]
    assert output.token_ids == golden["output_ids"][:8]
