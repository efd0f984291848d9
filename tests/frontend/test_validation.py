"""What each parameter does at 0, absent, null, the limit and one past it (patterns P1 and P12)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.base.errors import InvalidRequestError
from headrace.frontend import validation
from headrace.frontend.input_processor import InputProcessor, PromptTokens
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import RequestLimits
from headrace.messages.sampling_params import SamplingParams, StructuredOutputParams

LIMITS = RequestLimits(max_model_len=64, vocab_size=1000, kv_cache_tokens=64, max_logprobs=5)
PROMPT = [5, 6, 7, 8]

# (field, value, whether it is accepted): what the page on parameters cannot write as JSON, and sizes.
TABLE: list[tuple[str, Any, bool]] = [
    ("n", 10**8, False),
    ("n", True, False),
    ("temperature", math.inf, False),
    ("temperature", -math.inf, False),
    ("temperature", "nan", False),
    ("min_p", -math.inf, False),
    ("max_tokens", True, False),
    ("stop", ["a"] * 64, True),
    ("stop", ["a"] * 65, False),
    ("stop", ["a" * 1024] * 8, True),
    ("stop", ["a" * 1024] * 9, False),
    ("stop", ["a" * 1025], False),
    ("stop", None, True),
    ("stop_token_ids", [2**31], False),
    ("stop_token_ids", [1] * 128, True),
    ("stop_token_ids", [1] * 129, False),
    ("logit_bias", {"5": 1.0}, False),
    ("allowed_token_ids", [1] * 1001, False),
    ("bad_words", ["\u0001"], True),
    ("bad_words", ["\t"], False),
    ("bad_words", [None], False),
    ("bad_words", ["fox"] * 128, True),
    ("bad_words", ["fox"] * 129, False),
    ("bad_words", ["zq" * 600], False),
    ("structured_outputs", StructuredOutputParams(), False),
    ("structured_outputs", StructuredOutputParams(regex="a", json="{}"), False),
    ("structured_outputs", StructuredOutputParams(regex="a"), True),
    ("structured_outputs", StructuredOutputParams(choice=()), False),
]


def make_input(tokenizer: Tokenizer, limits: RequestLimits = LIMITS) -> InputProcessor:
    return InputProcessor(tokenizer, limits, seed=0, id_suffix="t")


@pytest.mark.parametrize(("field", "value", "accepted"), TABLE, ids=lambda value: repr(value)[:24])
def test_table(field: str, value: Any, accepted: bool, byte_level: Tokenizer) -> None:
    """B046, B047, B050, B053, B094 and the limits of every parameter."""

    def submit() -> None:
        params = SamplingParams(**{field: value})
        make_input(byte_level).make_request(PromptTokens(PROMPT), params, external_id="x", arrival=0.0)

    if accepted:
        submit()
        return
    with pytest.raises(ValueError) as caught:
        submit()
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.param == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("length", "accepted"), [(0, False), (1, True), (63, True), (64, False), (65, False)])
def test_prompt_length(length: int, accepted: bool, byte_level: Tokenizer) -> None:
    """B041: one token of room is enough, none is not."""
    prompt = {"prompt_token_ids": [5] * length}
    if accepted:
        assert make_input(byte_level).tokenize(prompt).token_ids == [5] * length
        return
    with pytest.raises(InvalidRequestError) as caught:
        make_input(byte_level).tokenize(prompt)
    assert caught.value.code == ("context_length_exceeded" if length else "empty_prompt")
    assert length == 0 or "64" in str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        {"prompt": ""},
        [1000],
        [-1],
        ["a"],
        [True],
        [1.0],
        None,
        5,
        {},
        {"prompt": 5},
        {"prompt_token_ids": "ab"},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": "a", "multi_modal_data": {}},
        b"ab",
        [[1]],
        {"a": "b"},
    ],
    ids=repr,
)
def test_prompts_that_are_none(prompt: Any, byte_level: Tokenizer) -> None:
    """B049 and odd forms."""
    with pytest.raises(InvalidRequestError):
        make_input(byte_level).tokenize(prompt)


def test_an_empty_text_starts_from_bos_where_there_is_one(byte_fallback: Tokenizer) -> None:
    """B049."""
    assert make_input(byte_fallback).tokenize("").token_ids == [1]


def test_long_text_is_refused_before_it_is_tokenised(byte_level: Tokenizer) -> None:
    text = "a" * (64 * byte_level.max_chars_per_token + 1)
    with pytest.raises(InvalidRequestError) as caught:
        make_input(byte_level).num_chars(text)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("asked", "given"), [(None, 60), (0, 0), (1, 1), (59, 59), (60, 60), (61, 60), (10**12, 60)])
def test_max_tokens_is_cut_to_the_room(asked: int | None, given: int, byte_level: Tokenizer) -> None:
    """B058."""
    request = make_input(byte_level).make_request(
        PromptTokens(PROMPT), SamplingParams(max_tokens=asked), external_id="x", arrival=0.0
    )
    assert request.sampling.max_tokens == given


@pytest.mark.parametrize(("asked", "given"), [(-1, 0), (0, 0), (1, 1), (999, 999), (1000, 0), (2**40, 0)])
def test_top_k_is_small_or_none(asked: int, given: int, byte_level: Tokenizer) -> None:
    """B094: no number reaches the sampler that its tables cannot hold."""
    params = SamplingParams(top_k=asked)
    request = make_input(byte_level).make_request(PromptTokens(PROMPT), params, external_id="x", arrival=0.0)
    assert request.sampling.top_k == given


def test_min_tokens_follows_the_room(byte_level: Tokenizer) -> None:
    params = SamplingParams(max_tokens=None, min_tokens=500)
    request = make_input(byte_level).make_request(PromptTokens(PROMPT), params, external_id="x", arrival=0.0)
    assert request.sampling.min_tokens == request.sampling.max_tokens == 60


@pytest.mark.parametrize("asked", [-1, 1000, 999, 500])
def test_whole_vocabulary_logprobs_have_a_product_bound(asked: int) -> None:
    """B095: no spelling of a huge number gets through."""
    limits = RequestLimits(max_model_len=16384, vocab_size=1000, kv_cache_tokens=16384, max_logprobs=-1)
    long, short = 9000, 4
    with pytest.raises(InvalidRequestError) as caught:
        validation.check_sampling(SamplingParams(prompt_logprobs=asked), long, limits)
    assert caught.value.param == "prompt_logprobs"
    validation.check_sampling(SamplingParams(prompt_logprobs=asked, logprobs=asked), short, limits)
    with pytest.raises(InvalidRequestError):
        validation.check_sampling(SamplingParams(logprobs=asked, max_tokens=None), short, limits)


def test_a_request_that_cannot_fit_alone_is_refused() -> None:
    """B038."""
    limits = RequestLimits(max_model_len=2048, vocab_size=1000, kv_cache_tokens=512)
    validation.check_fits(500, 12, limits)
    for prompt, output in ((500, 13), (700, 1), (1, 2047)):
        with pytest.raises(InvalidRequestError):
            validation.check_fits(prompt, output, limits)
    roomy = RequestLimits(max_model_len=2048, vocab_size=1000, kv_cache_tokens=2048)
    validation.check_fits(2000, 10**6, roomy)


def test_masks_that_forbid_everything(byte_level: Tokenizer) -> None:
    """B056."""
    fox = byte_level.encode(" fox")
    assert len(fox) == 1, "the test needs a word that is one token"
    source = make_input(byte_level)

    def submit(**options: Any) -> None:
        source.make_request(PromptTokens(PROMPT), SamplingParams(**options), external_id="x", arrival=0.0)

    refused: list[dict[str, Any]] = [
        {"allowed_token_ids": fox, "bad_words": ["fox"]},
        {"allowed_token_ids": [0], "min_tokens": 1},
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
    ]
    for options in refused:
        with pytest.raises(InvalidRequestError) as caught:
            submit(**options)
        assert caught.value.param == "allowed_token_ids"
    submit(allowed_token_ids=[*fox, 9], bad_words=["fox"])
    submit(allowed_token_ids=[0], min_tokens=1, ignore_eos=True)
    submit(allowed_token_ids=[7], logit_bias={7: -100})


def test_bad_words_are_spelt_with_and_without_a_space(byte_level: Tokenizer) -> None:
    """B052."""
    source = make_input(byte_level)
    for word in ("fox", " fox", "brown fox", "\u4eca\u5929"):
        params = SamplingParams(bad_words=[word])
        request = source.make_request(PromptTokens(PROMPT), params, external_id="x", arrival=0.0)
        texts = {byte_level.decode(ids) for ids in request.bad_words_token_ids}
        assert texts == {word.strip(), " " + word.strip()}


@pytest.mark.parametrize(
    ("value", "accepted"), [(None, True), ("a", True), ("s" * 128, True), ("", False), ("s" * 129, False), (5, False)]
)
def test_cache_salt(value: Any, accepted: bool) -> None:
    """B098."""
    if accepted:
        validation.check_cache_salt(value)
    else:
        with pytest.raises(InvalidRequestError):
            validation.check_cache_salt(value)


@pytest.mark.parametrize("value", ["", "a\nb", "x" * 129, 5, None, "a\x00"])
def test_request_ids(value: Any) -> None:
    """B031."""
    with pytest.raises(InvalidRequestError):
        validation.check_request_id(value)
    validation.check_request_id("x" * 128)


def test_priority_is_never_ignored() -> None:
    fcfs, priority = LIMITS, RequestLimits(64, 1000, 64, has_priority=True)
    validation.check_priority(0, fcfs)
    validation.check_priority(-5, priority)
    for value, limits in ((1, fcfs), (1 << 63, priority), (1.0, priority), (True, priority), ("1", priority)):
        with pytest.raises(InvalidRequestError):
            validation.check_priority(value, limits)


def test_errors_do_not_echo_what_was_sent(byte_level: Tokenizer) -> None:
    """B100."""
    secret = "hunter2"
    for prompt in ([secret] * 3000, {secret * 100: 1, "prompt": "a"}):
        with pytest.raises(InvalidRequestError) as caught:
            make_input(byte_level).tokenize(prompt)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 500
