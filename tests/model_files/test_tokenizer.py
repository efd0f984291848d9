"""Tokenizers from both formats: the same ids as the reference on anything, and a cache that heals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.base.errors import ModelFileError
from headrace.model_files import tokenizer as tokenizer_module
from headrace.model_files.gguf_tokenizer import derive_merges
from headrace.model_files.pre_tokenizers import PRE_TOKENIZERS
from headrace.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from tests.model_files.builders import write_gguf

TEXTS = [
    "Hello, world! It's 2024; don't panic.",
    "日本語と中文，还有한국어。",
    "def f(x: int) -> int:\n    return x ** 2  # ²\n\n\n\tclass A: pass\r\n",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff\u00a0",
    "  12   34\n\n\n56\t7  \u3000 x ",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>x<|im_start|",
    "",
    " ",
    "\n",
    "A" * 300,
    "\x00\x01\x7f\u0085\u2028",
]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HEADRACE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def loaded(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(tmp_path_factory.mktemp("module-home")))
        return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def reference(shared_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(shared_dir / "conformance" / "tokenizer" / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_the_reference(loaded: LoadedTokenizer, reference: Tokenizer, text: str) -> None:
    ids = loaded.tokenizer.encode(text).ids
    assert ids == reference.encode(text).ids
    assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)


@pytest.mark.slow
def test_same_ids_on_random_text(loaded: LoadedTokenizer, reference: Tokenizer) -> None:
    pieces = st.sampled_from([*"abcXYZ 123\n\t'é中語😀.,;(){}_-", "  ", "\n\n", "<|im_end|>", " the", "'ll", "\r\n"])
    texts = st.one_of(st.text(max_size=60), st.lists(pieces, max_size=60).map("".join))

    @settings(max_examples=1500, deadline=None)
    @given(texts)
    def compare(text: str) -> None:
        assert loaded.tokenizer.encode(text).ids == reference.encode(text).ids

    compare()


def test_golden_prompts(loaded: LoadedTokenizer, goldens: list[dict[str, Any]]) -> None:
    for prompt in goldens:
        assert loaded.tokenizer.encode(prompt["text_prompt"]).ids == prompt["prompt_ids"], prompt["id"]


def test_facts_of_the_default_model(loaded: LoadedTokenizer, shared_dir: Path) -> None:
    info = loaded.info
    assert (info.vocab_size, info.bos_token_id, info.eos_token_ids, info.add_bos) == (49152, 1, (2,), False)
    assert info.special_tokens["<|im_start|>"] == 1 and len(info.special_tokens) == 17
    assert info.chat_template == (shared_dir / "conformance" / "tokenizer" / "chat_template.jinja").read_text()


# ---------------------------------------------------------------- cache


def test_second_start_builds_nothing(smollm2_gguf: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer(smollm2_gguf)
    assert len(list((home / "tokenizers").glob("*/tokenizer.json"))) == 1
    monkeypatch.setattr(tokenizer_module, "build_tokenizer", lambda vocabulary: pytest.fail("built again"))
    second = load_tokenizer(smollm2_gguf)
    assert second.info == first.info
    for text in TEXTS:
        assert second.tokenizer.encode(text).ids == first.tokenizer.encode(text).ids


@pytest.mark.parametrize("spoil", ["", "{", "other"])
def test_a_spoilt_entry_is_built_again(smollm2_gguf: Path, home: Path, spoil: str) -> None:
    first = load_tokenizer(smollm2_gguf)
    (entry,) = (home / "tokenizers").glob("*/tokenizer.json")
    good = entry.read_text()
    entry.write_text(make_word_level().to_str() if spoil == "other" else spoil)
    assert load_tokenizer(smollm2_gguf).tokenizer.encode("Hello").ids == first.tokenizer.encode("Hello").ids
    assert entry.read_text() == good


def test_a_cache_that_cannot_be_written_is_no_fault(smollm2_gguf: Path, home: Path) -> None:
    (home / "tokenizers").write_text("a file where the folder should be")
    assert load_tokenizer(smollm2_gguf).info.vocab_size == 49152


# ---------------------------------------------------------------- folders


def make_word_level() -> Tokenizer:
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_folder(folder: Path, config: dict[str, Any], bos: bool = False) -> Path:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_word_level()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_facts(tmp_path: Path) -> None:
    write_folder(tmp_path, {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "T"}, bos=True)
    tokenizer, info = load_tokenizer(tmp_path)
    assert tokenizer.encode("a b").ids == [0, 2, 3]
    assert (info.bos_token_id, info.eos_token_ids, info.add_bos, info.chat_template) == (0, (1,), True, "T")
    assert info.special_tokens == {"<s>": 0, "</s>": 1} and info.vocab_size == 4
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert load_tokenizer(tmp_path).info.eos_token_ids == (1, 3)
    assert load_tokenizer(tmp_path / "tokenizer.json").info.vocab_size == 4


def test_folder_without_bos(tmp_path: Path) -> None:
    info = load_tokenizer(write_folder(tmp_path, {"bos_token": None})).info
    assert (info.bos_token_id, info.add_bos, info.eos_token_ids, info.chat_template) == (None, False, (), None)


def test_where_a_chat_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    write_folder(tmp_path, {"chat_template": named})
    assert load_tokenizer(tmp_path).info.chat_template == "D"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert load_tokenizer(tmp_path).info.chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F\n")
    assert load_tokenizer(tmp_path).info.chat_template == "F\n"


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model alone"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: is not a tokenizer"):
        load_tokenizer(tmp_path)


# ---------------------------------------------------------------- GGUF vocabularies


def write_vocabulary(tmp_path: Path, model: str, more: dict[str, Any]) -> Path:
    metadata = {"tokenizer.ggml.model": model, **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}
    return write_gguf(tmp_path / "v.gguf", "llama", metadata, {"w": np.zeros(8, np.float32)})


BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = ["▁", "a", "b", "c", "ab", "▁a", "abc", "▁abc", "bc", "▁b"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<extra>"]
SPM = {
    "tokens": SPM_TOKENS,
    "scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -3.0, -1.0, -2.0, -4.0, -0.5, -5.0] + [0.0],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def best_pair_merging(text: str) -> list[str]:
    """SentencePiece's rule spelt out: join the neighbours whose join scores best, the leftmost first."""
    scores = dict(zip(SPM_TOKENS, SPM["scores"], strict=True))
    parts = list(text)
    while True:
        joins = [
            (-scores[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in PIECES
        ]
        if not joins:
            return parts
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path, "llama", SPM)).tokenizer

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet="abc ", min_size=1, max_size=12))
    def compare(text: str) -> None:
        pieces = tokenizer.encode(text, add_special_tokens=False).tokens
        assert pieces == best_pair_merging("▁" + text.replace(" ", "▁"))
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    compare()


def test_sentencepiece_bytes_bos_and_added_tokens(tmp_path: Path) -> None:
    tokenizer, info = load_tokenizer(write_vocabulary(tmp_path, "llama", SPM))
    assert info.add_bos and info.bos_token_id == 1
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é😀\n").ids) == "é😀\n"
    assert tokenizer.encode("a<extra></s>", add_special_tokens=False).tokens == ["▁a", "<extra>", "</s>"]
    assert info.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_sentencepiece_flags(tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer, info = load_tokenizer(write_vocabulary(tmp_path, "llama", SPM | flags))
    assert not info.add_bos
    assert tokenizer.encode("abc").tokens == ["abc", "</s>"]


def test_merges_take_only_ordinary_pieces() -> None:
    assert derive_merges(["a", "b", "ab", "<x>", "a<x>"], [1, 1, 1, 3, 1], [-1.0, -2.0, -3.0, 0.0, 0.0]) == [("a", "b")]


BPE_TOKENS = ["<e>", "Ġ", "a", "b", "1", "2", "ab", "Ġab", "12", "<t>"]
BPE = {
    "tokens": BPE_TOKENS,
    "token_type": [3, *[1] * 8, 4],
    "merges": ["a b", "Ġ ab", "1 2"],
    "pre": "llama-bpe",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def test_byte_level_flags_and_kinds(tmp_path: Path) -> None:
    tokenizer, info = load_tokenizer(write_vocabulary(tmp_path, "gpt2", BPE))
    assert info.add_bos
    assert tokenizer.encode("ab ab12<t>").tokens == ["<e>", "ab", "Ġab", "12", "<t>"]
    tokenizer, info = load_tokenizer(write_vocabulary(tmp_path, "gpt2", BPE | {"pre": "qwen2"}))
    assert not info.add_bos
    assert tokenizer.encode("ab ab12<t>").tokens == ["ab", "Ġab", "1", "2", "<t>"]
    assert tokenizer.decode(tokenizer.encode("ab ab12").ids) == "ab ab12"


@pytest.mark.parametrize("kind", sorted(PRE_TOKENIZERS))
def test_every_kind_loses_nothing(kind: str) -> None:
    pre_tokenizer = PRE_TOKENIZERS[kind].build()
    for text in TEXTS:
        pieces = pre_tokenizer.pre_tokenize_str(text)
        assert [span for _, span in pieces] == sorted(span for _, span in pieces)
        assert sum(len(piece) for piece, _ in pieces) == len(text.encode())


def pieces_of(kind: str, text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in PRE_TOKENIZERS[kind].build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("gpt-2", "It's  12345 ok", ["It", "'s", " ", " 12345", " ok"]),
        ("llama-bpe", "It'S  12345 ok\n\n", ["It", "'S", " ", " ", "123", "45", " ok", "\n\n"]),
        ("qwen2", "a 12 (b)\n", ["a", " ", "1", "2", " (", "b", ")\n"]),
        ("tekken", "fooBar 12/\n", ["foo", "Bar", " ", "1", "2", "/\n"]),
        ("gpt-4o", "HTTPServer's 1234", ["HTTPServer's", " ", "123", "4"]),
        ("starcoder", "x  12", ["x", "  ", "1", "2"]),
        ("deepseek-llm", "hi 你好 12!", ["hi", " ", "你好", " ", "12", "!"]),
        ("deepseek-llm", "ab ა µÀ", ["ab", " ", "ა", " µÀ"]),
        ("deepseek-coder", "hi 12!", ["hi", " ", "1", "2", "!"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_kinds_cut_as_they_should(kind: str, text: str, pieces: list[str]) -> None:
    assert pieces_of(kind, text) == pieces


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("bert", BPE, "tokenizer model 'bert' is not supported; supported: gpt2, llama"),
        ("gpt2", BPE | {"pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported; supported: gpt-2"),
        ("gpt2", BPE | {"merges": ["a c"]}, "merge 0 of 'tokenizer.ggml.merges' makes no token"),
        ("gpt2", BPE | {"merges": ["ab"]}, "merge 0"),
        ("gpt2", {k: v for k, v in BPE.items() if k != "merges"}, "'tokenizer.ggml.merges' is missing"),
        ("gpt2", BPE | {"token_type": [1]}, "not one entry per token"),
        ("gpt2", BPE | {"tokens": ["a", "a"], "token_type": [1, 1]}, "has 'a' twice"),
        ("gpt2", {"pre": "gpt-2"}, "has no vocabulary"),
        ("llama", {k: v for k, v in SPM.items() if k != "scores"}, "'tokenizer.ggml.scores' has not one entry"),
    ],
)
def test_vocabularies_that_cannot_work(tmp_path: Path, model: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer(write_vocabulary(tmp_path, model, values))
