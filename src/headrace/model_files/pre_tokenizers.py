r"""How byte-level BPE vocabularies cut text before merging, by the kind that a GGUF file names.

Owns the table of kinds. A kind is a chain of patterns: each cuts what the former left, and what matches stands alone.

`smollm` is cut like GPT-2: no token of that vocabulary joins digits or a digit with anything else, so that cutting
digits first would differ only in how white space before a digit is grouped, and there the `tokenizer.json` that such
files are compared with groups it as before letters.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from headrace.base.errors import ModelFileError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_1 = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED_2 = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = rf"{_ENGLISH_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES_AND_SPACE}"
_QWEN2 = rf"{_ENGLISH_SUFFIX}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_LINES_AND_SPACE}"
_TEKKEN = rf"{_CASED_1}|{_CASED_2}|\p{{N}}|{_SLASHED}|{_LINES_AND_SPACE}"
_GPT4O = rf"{_CASED_1}{_ENGLISH_SUFFIX}?|{_CASED_2}{_ENGLISH_SUFFIX}?|\p{{N}}{{1,3}}|{_SLASHED}|{_LINES_AND_SPACE}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, but not Georgian ones: their case is younger than the vocabularies that are cut this way.
_CASED_LETTERS = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}]]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One kind. ``ignore_merges`` keeps a piece that is a token; ``add_bos`` holds where the file is silent."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The chain, followed by the byte alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to text first."""
        return normalizers.NFC() if self.nfc else None


_BY_GROUP: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "gpt2", "smollm", "mpt", "olmo"): PreTokenizer((_GPT2,)),
    ("starcoder", "refact", "command-r", "codeshell", "exaone"): PreTokenizer((r"\p{N}", _GPT2)),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"): PreTokenizer((_QWEN2,), nfc=True),
    ("stablelm2",): PreTokenizer((_QWEN2,)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,)),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_CASED_LETTERS}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for names, kind in _BY_GROUP.items() for name in names}


def find_pre_tokenizer(name: str, origin: str) -> PreTokenizer:
    """The kind of that name.

    Raises:
        ModelFileError: an unknown one; guessing would give wrong ids without a sign.
    """
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(f"{origin}: pre-tokenizer '{name}' is not supported; supported: {known}")
    return PRE_TOKENIZERS[name]
