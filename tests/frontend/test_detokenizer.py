"""Joined pieces equal the decoding at once, for every cut and every kind of vocabulary."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frontend.detokenizer import make_detokenizer, split_text
from headrace.frontend.tokenizer import Tokenizer

from .conftest import MAKERS

KINDS = {name: make() for name, make in MAKERS.items()}
SIZES = {name: tokenizer.num_tokens for name, tokenizer in KINDS.items()}
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


def play(tokenizer: Tokenizer, ids: list[int], cuts: set[int], prompt: list[int], skip: bool = True) -> str:
    detokenizer = make_detokenizer(tokenizer, prompt, skip)
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [detokenizer.decode(ids[a:b]) for a, b in pairwise(borders)]
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.data(), cuts=st.sets(st.integers(0, 30)), skip=st.booleans())
def test_any_ids_any_cut(kind: str, data: st.DataObject, cuts: set[int], skip: bool) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, SIZES[kind] + 3), max_size=30))
    assert play(tokenizer, ids, cuts, [], skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=TEXT, cuts=st.sets(st.integers(0, 30)), context=TEXT)
def test_any_text_any_cut_equals_the_backend(kind: str, text: str, cuts: set[int], context: str) -> None:
    """B011: after a prompt the text is what the whole has beyond the prompt."""
    tokenizer = KINDS[kind]
    prompt = tokenizer.encode(context, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, before = tokenizer.backend.decode(prompt + ids), tokenizer.backend.decode(prompt)
    assert whole.startswith(before)
    assert play(tokenizer, ids, cuts, prompt) == whole[len(before) :]


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, SIZES["wordpiece"] - 1), max_size=20), cuts=st.sets(st.integers(0, 20)))
def test_other_kinds_by_context(ids: list[int], cuts: set[int]) -> None:
    tokenizer = KINDS["wordpiece"]
    for split in (0, len(ids) // 2):
        prompt, answer = ids[:split], ids[split:]
        expected = tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
        assert play(tokenizer, answer, cuts, prompt) == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_prompt_that_ends_inside_a_character(kind: str) -> None:
    """B010: the prompt's bytes complete a character or are dropped; its text never shows."""
    tokenizer = KINDS[kind]
    prompt = tokenizer.encode("the ", add_special_tokens=False)
    parts = tokenizer.encode("\U0001f600", add_special_tokens=False)[-4:]
    assert [tokenizer.token_bytes[i] for i in parts] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    word = tokenizer.encode("one", add_special_tokens=False)
    for cut in (1, 2, 3):
        assert play(tokenizer, parts[cut:], set(), prompt + parts[:cut]) == "\U0001f600"
        shown = play(tokenizer, word, set(range(9)), prompt + parts[:cut])
        assert shown.strip() == "one"
    assert play(tokenizer, [], set(), prompt + parts[:2]) == ""
    assert play(tokenizer, parts[1:2], set(), prompt + parts[:1]) == "\ufffd"


def test_incomplete_characters_are_held(byte_level: Tokenizer) -> None:
    parts = byte_level.encode("\U0001f600", add_special_tokens=False)
    detokenizer = make_detokenizer(byte_level, [])
    assert [detokenizer.decode([part]) for part in parts] == ["", "", "", "\U0001f600"]
    assert detokenizer.flush() == ""


def test_a_first_space_belongs_to_an_answer_but_not_to_a_text(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("the one", add_special_tokens=False)
    assert play(byte_fallback, ids, set(), [1]) == "the one"
    assert play(byte_fallback, ids, set(), byte_fallback.encode("one")) == " the one"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.data())
def test_token_texts_join_to_the_text(kind: str, data: st.DataObject) -> None:
    """B013."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, SIZES[kind] - 1), max_size=30))
    texts = split_text(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False)


def test_newlines_at_the_start_of_a_prompt_do_not_repeat(byte_level: Tokenizer) -> None:
    """B013."""
    ids = byte_level.encode("\n\n2) A box holds 12")
    assert "".join(split_text(byte_level, ids)) == "\n\n2) A box holds 12"
    assert sum(text.count("\n") for text in split_text(byte_level, ids)) == 2
