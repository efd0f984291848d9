"""Seeds, ids and defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.base.errors import InvalidRequestError
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.fan_out import fan_out
from headrace.frontend.input_processor import InputProcessor, PromptTokens
from headrace.frontend.seeds import child_seed, derive_seed
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import RequestLimits
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.sampling_params import SEED_LIMIT, SamplingParams

LIMITS = RequestLimits(max_model_len=64, vocab_size=1000, kv_cache_tokens=64)


def make_input(tokenizer: Tokenizer | None, seed: int = 0, **options: object) -> InputProcessor:
    return InputProcessor(tokenizer, LIMITS, seed=seed, id_suffix="t", **options)  # type: ignore[arg-type]


def submit(source: InputProcessor, params: SamplingParams | None = None) -> EngineCoreRequest:
    return source.make_request(PromptTokens([5, 6]), params, external_id="x", arrival=1.5)


def test_every_request_has_a_seed_that_the_engine_seed_gives(byte_level: Tokenizer) -> None:
    """B026: a seed belongs to its request; one engine seed gives one sequence of them."""
    first, second = make_input(byte_level, 3), make_input(byte_level, 3)
    seeds = [submit(first).sampling.seed for _ in range(5)]
    assert seeds == [submit(second).sampling.seed for _ in range(5)]
    assert len(set(seeds)) == 5 and None not in seeds
    assert seeds != [submit(make_input(byte_level, 4)).sampling.seed for _ in range(5)]
    assert submit(first, SamplingParams(seed=11)).sampling.seed == 11
    assert submit(first, SamplingParams(seed=0)).sampling.seed == 0


def test_children_have_seeds_of_their_own(byte_level: Tokenizer) -> None:
    request = submit(make_input(byte_level), SamplingParams(n=4, seed=11, prompt_logprobs=2))
    children = fan_out(request)
    seeds = [child.sampling.seed for child in children]
    assert seeds == [child_seed(11, index) for index in range(4)] and len(set(seeds)) == 4
    assert seeds[0] == 11, "the first answer does not depend on n"
    assert len({child.request_id for child in children}) == 4
    assert [child.sampling.prompt_logprobs for child in children] == [2, None, None, None]
    assert all(child.sampling.n == 1 for child in children)


def test_derived_seeds_are_legal_and_spread() -> None:
    seeds = {derive_seed(seed, index) for seed in (-5, 0, 1, 2**62) for index in range(200)}
    assert len(seeds) == 800
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)


def test_internal_ids_differ_for_equal_outer_ones(byte_level: Tokenizer) -> None:
    """B031."""
    source = make_input(byte_level)
    assert submit(source).request_id != submit(source).request_id


def test_defaults_of_the_model_apply_only_when_nothing_is_asked(byte_level: Tokenizer) -> None:
    source = make_input(byte_level, defaults={"temperature": 0.6, "top_p": 0.95})
    assert submit(source).sampling.temperature == 0.6
    assert submit(source, SamplingParams()).sampling.temperature == 1.0


def test_ids_that_end_a_text(byte_level: Tokenizer) -> None:
    source = make_input(byte_level, eos_token_ids=(2, 0, 5000))
    assert submit(source).eos_token_ids == (0, 2), "both sources, once each, inside the vocabulary"
    assert submit(source, SamplingParams(ignore_eos=True)).eos_token_ids == ()


def test_without_a_tokenizer_ids_still_work() -> None:
    source = make_input(None)
    assert source.tokenize([1, 2]).token_ids == [1, 2]
    assert submit(source).prompt_token_ids == [5, 6]


def test_a_chat_begins_with_bos_unless_it_is_not_to(byte_fallback: Tokenizer) -> None:
    source = make_input(byte_fallback)
    messages = [{"role": "user", "content": "ab"}]
    for text, told in (("{{ messages[0].content }}", False), ("<s>{{ messages[0].content }}", True)):
        template = ChatTemplate(text, {})
        plain = source.tokenize_chat(template, messages).token_ids
        bare = source.tokenize_chat(template, messages, add_special_tokens=False).token_ids
        assert plain.count(1) == 1 and plain[0] == 1
        assert bare == (plain if told else plain[1:])


def test_tools_are_told_of_where_the_template_has_no_place_for_them(byte_level: Tokenizer) -> None:
    source = make_input(byte_level)
    source.limits = replace(LIMITS, max_model_len=4096)
    plain = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
    reads = ChatTemplate("{{ messages[0].content }}{{ tools | length }}", {})
    user, tools = {"role": "user", "content": "x"}, [{"type": "function", "function": {"name": "f"}}]
    assert source.tokenize_chat(reads, [user], tools=tools).text == "x1"
    told = source.tokenize_chat(plain, [user], tools=tools).text or ""
    assert told.startswith("<system>You may call") and '"name": "f"' in told and told.endswith("<user>x")
    system = {"role": "system", "content": [{"type": "text", "text": "S"}]}
    joined = source.tokenize_chat(plain, [system, user], tools=tools).text or ""
    assert joined.startswith("<system>S") and joined.count("<system>") == 1 and '"name": "f"' in joined
    wrong: list[Any] = [[5], "x", [{"role": "system", "content": 5}], []]
    for messages in wrong:
        with pytest.raises(InvalidRequestError, match="messages"):
            source.tokenize_chat(plain, messages, tools=tools)
