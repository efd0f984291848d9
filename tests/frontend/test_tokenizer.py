"""Ids, bytes and BOS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from headrace.base.errors import InvalidRequestError
from headrace.frontend.tokenizer import TextKind, Tokenizer

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "def f(x):\n    return x**2\n",
    "\u65e5\u672c\u8a9e \u4f60\u597d",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "e\u0301 caf\u00e9",
    "\t\ttabs  and   spaces",
]


def test_kinds(byte_level: Tokenizer, byte_fallback: Tokenizer, wordpiece: Tokenizer) -> None:
    assert byte_level.kind is TextKind.BYTE_LEVEL
    assert byte_fallback.kind is TextKind.BYTE_FALLBACK and byte_fallback.strips_first_space
    assert wordpiece.kind is TextKind.OTHER


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_equals_the_backend(text: str, byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == tokenizer.backend.decode(ids)
        joined = b"".join(tokenizer.token_bytes[i] for i in tokenizer.encode(text, add_special_tokens=False))
        assert joined.decode().removeprefix(" " if tokenizer.strips_first_space else "") == text


def test_the_reference_tokenizer(shared_dir: Path, goldens: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer(Backend.from_file(str(shared_dir / "conformance" / "tokenizer" / "tokenizer.json")))
    for golden in goldens:
        text, ids = golden.get("text_prompt"), golden["prompt_ids"]
        if text:
            assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.backend.decode(
            ids, skip_special_tokens=False
        )


def test_bos_comes_exactly_once(byte_fallback: Tokenizer) -> None:
    """B059: plain text, rendered text that already has BOS, and chats with and without it."""
    plain = byte_fallback.encode("one")
    assert plain[0] == 1 and plain.count(1) == 1
    assert byte_fallback.encode("<s>one").count(1) == 1
    assert byte_fallback.encode("<s>one", add_special_tokens=False).count(1) == 1
    assert byte_fallback.encode("one", add_special_tokens=False).count(1) == 0
    assert byte_fallback.encode_chat("<s>one") == byte_fallback.encode("<s>one", add_special_tokens=False)
    assert byte_fallback.encode_chat("one").count(1) == 1


def test_a_model_that_adds_no_bos_keeps_text_as_it_is(byte_level: Tokenizer) -> None:
    assert not byte_level.adds_bos
    ids = byte_level.encode("<begin><begin>a")
    assert ids[:2] == [1, 1] and byte_level.encode_chat("<begin><begin>a") == ids


def test_lone_surrogates_are_the_callers_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError):
        byte_level.encode("a\ud800b")


def test_ids_that_pad_the_head_have_no_text(byte_level: Tokenizer, wordpiece: Tokenizer) -> None:
    """B055."""
    for tokenizer in (byte_level, wordpiece):
        assert tokenizer.token_text(900) == ""
        assert tokenizer.decode([900, 901]) == ""


def test_special_tokens_can_be_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<turn>Hi<end>")
    assert byte_level.decode(ids) == "Hi"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<turn>Hi<end>"
    assert byte_level.token_text(2) == "<turn>"


def test_many_threads_get_the_same(byte_level: Tokenizer) -> None:
    def work(_: int) -> list[str]:
        return [byte_level.decode(byte_level.encode(text)) for text in TEXTS]

    with ThreadPoolExecutor(8) as pool:
        assert all(result == TEXTS for result in pool.map(work, range(64)))
