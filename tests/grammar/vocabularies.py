"""Tokenizers for the tests of grammars: bytes with a few longer tokens, and pieces with byte fallback."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.core.grammar_backend import GrammarTokenizer, TokenizerSource

MERGED = ["Ġa", "Ġb", "12", "34", "ab", "abc", "Ċ", "ĊĊ", "ĠĠĠĠ"]


def byte_level() -> tokenizers.Tokenizer:
    """One token per byte, some merged ones, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = []
    for token in MERGED:
        if token not in vocab:
            vocab[token] = len(vocab)
            merges.append((token[:-1], token[-1]))
            for size in range(2, len(token)):
                if token[:size] not in vocab:
                    vocab[token[:size]] = len(vocab)
                    merges.insert(-1, (token[: size - 1], token[size - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<other>"])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Pieces with a mark for spaces; what they lack is written in bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "é", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def source_of(backend: tokenizers.Tokenizer, *eos: str) -> TokenizerSource:
    return TokenizerSource.from_backend(backend, [backend.token_to_id(token) for token in eos])


def grammar_tokenizer(backend: tokenizers.Tokenizer, *eos: str, extra: int = 0) -> GrammarTokenizer:
    return GrammarTokenizer(source_of(backend, *eos), backend.get_vocab_size() + extra)
