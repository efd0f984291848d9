"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF file.

Two models exist: byte-level BPE with listed merges (``gpt2``), and SentencePiece with scores (``llama``), whose merges
are derived: two pieces join when their join is a piece, best score first. BOS and EOS, where the file wants them, are
added by the post-processor and nowhere else.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from headrace.base.errors import ModelFileError
from headrace.model_files.gguf import GGUFFile
from headrace.model_files.pre_tokenizers import find_pre_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"


class GGUFVocabulary:
    """The checked ``tokenizer.ggml.*`` metadata of one file."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = str(file.path)
        self._metadata = file.metadata
        self.architecture = file.metadata.get("general.architecture", "")
        self.model = self.get("model")
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise ModelFileError(f"{self.path}: has no vocabulary ('tokenizer.ggml.tokens')")
        self.tokens: list[str] = tokens
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(token for token_id, token in enumerate(tokens) if self.ids[token] != token_id)
            raise ModelFileError(f"{self.path}: 'tokenizer.ggml.tokens' has {twice!r} twice")
        self.types: list[int] = self.get("token_type") or [_NORMAL] * len(tokens)
        if len(self.types) != len(tokens):
            raise ModelFileError(f"{self.path}: 'tokenizer.ggml.token_type' has not one entry per token")

    def get(self, key: str) -> Any:
        """A value under ``tokenizer.ggml.``, ``None`` when absent."""
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def token_id(self, key: str) -> int | None:
        """An id under ``tokenizer.ggml.`` that lies in the vocabulary."""
        value = self.get(key)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    @property
    def add_bos(self) -> bool:
        """Whether plain text begins with BOS; the file's flag, or what its kind does where it is silent."""
        if self.token_id("bos_token_id") is None:
            return False
        flag = self.get("add_bos_token")
        if flag is not None:
            return bool(flag)
        return self.model == "llama" or find_pre_tokenizer(self.pre, self.path).add_bos

    @property
    def add_eos(self) -> bool:
        """Whether plain text ends with EOS."""
        return self.token_id("eos_token_id") is not None and bool(self.get("add_eos_token"))

    @property
    def pre(self) -> str:
        """Kind of the pre-tokenizer."""
        return str(self.get("pre") or "default")

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found in text before anything else, in the order of their ids."""
        # Phi-3 takes the white space after its markers with them.
        eats_space = self.architecture == "phi3" and self.model == "llama"
        return [
            AddedToken(
                token,
                special=kind != _USER_DEFINED,
                normalized=False,
                rstrip=eats_space and kind == _CONTROL and token not in ("<s>", "<|endoftext|>"),
            )
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]


def build_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        ModelFileError: an unknown model or pre-tokenizer, or missing merges or scores.
    """
    if vocabulary.model == "gpt2":
        tokenizer = _build_byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer = _build_sentencepiece(vocabulary)
    else:
        raise ModelFileError(
            f"{vocabulary.path}: tokenizer model {vocabulary.model!r} is not supported; supported: gpt2, llama"
        )
    tokenizer.add_tokens(vocabulary.added_tokens())
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise ModelFileError(f"{vocabulary.path}: the vocabulary's special tokens do not keep their ids")
    if (template := _make_template(vocabulary)) is not None:
        tokenizer.post_processor = template
    return tokenizer


def _build_byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    kind = find_pre_tokenizer(vocabulary.pre, vocabulary.path)
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(vocabulary.get("merges") or []):
        left, space, right = merge.partition(" ")
        if not space or left + right not in vocabulary.ids:
            raise ModelFileError(f"{vocabulary.path}: merge {index} of 'tokenizer.ggml.merges' makes no token")
        merges.append((left, right))
    if not merges:
        raise ModelFileError(f"{vocabulary.path}: 'tokenizer.ggml.merges' is missing")
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=kind.ignore_merges))
    if (normalizer := kind.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise ModelFileError(f"{vocabulary.path}: 'tokenizer.ggml.scores' has not one entry per token")
    has_bytes = _BYTE in vocabulary.types
    unknown = vocabulary.token_id("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.ids,
            derive_merges(vocabulary.tokens, vocabulary.types, scores),
            unk_token=vocabulary.tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    adds_space = vocabulary.get("add_space_prefix")
    adds_space = True if adds_space is None else bool(adds_space)
    mark_spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), mark_spaces]) if adds_space else mark_spaces
    )
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def derive_merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a piece, the best piece first.

    Only ordinary pieces take part. Within one piece the order of its splits is that of the left part's length; they
    never compete for the same text.
    """
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _UNUSED)}
    ranked = sorted(
        (token_id for token_id, token in enumerate(tokens) if token in pieces), key=lambda i: (-scores[i], i)
    )
    return [
        (token[:cut], token[cut:])
        for token in (tokens[token_id] for token_id in ranked)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]


def _make_template(vocabulary: GGUFVocabulary) -> processors.TemplateProcessing | None:
    """What puts BOS before and EOS after plain text; ``None`` when neither is wanted."""
    bos = vocabulary.token_id("bos_token_id") if vocabulary.add_bos else None
    eos = vocabulary.token_id("eos_token_id") if vocabulary.add_eos else None
    before = [] if bos is None else [vocabulary.tokens[bos]]
    after = [] if eos is None else [vocabulary.tokens[eos]]
    if not before and not after:
        return None
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", "$B", *after],
        special_tokens=[(vocabulary.tokens[i], i) for i in {bos, eos} if i is not None],
    )
