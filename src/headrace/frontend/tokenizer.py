"""Text to token ids and back, on top of a fast tokenizer.

Owns the rule by which BOS is added (exactly once, however the text arrives) and the bytes behind each token id, from
which every text that leaves the engine is made. It knows nothing of requests.

Two kinds of vocabulary map each token to bytes, so that decoding is concatenation: byte-level BPE, and SentencePiece
with byte fallback. There the bytes are UTF-8 whose broken parts become U+FFFD. Any other kind decodes through the
backend. Ids beyond the tokenizer (rows that pad a model's head) are legal and have no text.

An instance is immutable apart from caches whose entries never change, and may be used from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

import tokenizers

from headrace.base.errors import InvalidRequestError

SPACE_MARK = "\u2581"


class TextKind(Enum):
    """How token ids become text."""

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    OTHER = "other"


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


def _classify(decoder: Any) -> tuple[TextKind, bool]:
    """Return the kind of a backend's decoder, and whether it takes one space off the start of a text."""
    if decoder is None:
        return TextKind.OTHER, False
    description = json.loads(decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return TextKind.BYTE_LEVEL, False
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and names[3:] in ([], ["Strip"]):
        replaces_mark = steps[0]["pattern"] == {"String": SPACE_MARK} and steps[0]["content"] == " "
        strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        if replaces_mark and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return TextKind.BYTE_FALLBACK, strip["start"] == 1
    return TextKind.OTHER, False


class _TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on first use."""

    def __init__(self, backend: tokenizers.Tokenizer, kind: TextKind) -> None:
        super().__init__()
        self._backend = backend
        self._kind = kind

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            data = b""
        elif self._kind is TextKind.BYTE_LEVEL:
            values = [_ALPHABET.get(char) for char in token]
            data = token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        elif self._kind is TextKind.BYTE_FALLBACK:
            data = _fallback_bytes(token)
        else:
            data = self._backend.decode([token_id], skip_special_tokens=False).encode()
        self[token_id] = data
        return data


def _fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode()


class _TokenPieces(dict[int, str | None]):
    """Token id to its text if its bytes are whole characters, else ``None``; skipped ids have ``""``."""

    def __init__(self, token_bytes: _TokenBytes, skipped: frozenset[int]) -> None:
        super().__init__()
        self._bytes = token_bytes
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | None:
        piece: str | None
        if token_id in self._skipped:
            piece = ""
        else:
            try:
                piece = self._bytes[token_id].decode()
            except UnicodeDecodeError:
                piece = None
        self[token_id] = piece
        return piece


class Tokenizer:
    """A tokenizer with the facts that serving needs.

    Args:
        backend: the fast tokenizer; truncation and padding are switched off.
        bos_token_id: the begin-of-sequence token, if the model has one.
        add_bos: whether plain text starts with BOS. ``None`` asks the backend's post-processor.
        eos_token_ids: ids that end a text.
        chat_template: the model's own template, if any.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        add_bos: bool | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.kind, self.strips_first_space = _classify(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_tokens: int = backend.get_vocab_size(with_added_tokens=True)
        self.max_chars_per_token = max((len(token) for token in backend.get_vocab(with_added_tokens=True)), default=1)
        self.token_bytes = _TokenBytes(backend, self.kind)
        self._pieces = {
            True: _TokenPieces(self.token_bytes, self.special_token_ids),
            False: _TokenPieces(self.token_bytes, frozenset()),
        }
        if add_bos is None:
            start = backend.encode("", add_special_tokens=True).ids[:1]
            add_bos = bos_token_id is not None and start == [bos_token_id]
        self.adds_bos = add_bos and bos_token_id is not None

    def pieces(self, skip_special_tokens: bool) -> dict[int, str | None]:
        """Return the shared table of token texts; ``None`` marks a token that is not whole characters by itself."""
        return self._pieces[skip_special_tokens]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; BOS comes at most once, whether or not the text already starts with it.

        Raises:
            InvalidRequestError: the text holds lone surrogates.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):
            raise InvalidRequestError("text must be valid Unicode without lone surrogates", param="prompt") from None
        return self._with_one_bos(ids) if add_special_tokens else ids

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a rendered chat; BOS is added when the model wants one and the template wrote none."""
        ids = self.encode(text, add_special_tokens=False)
        return self._with_one_bos(ids)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos:
            return ids
        bos = self.bos_token_id
        first = next((index for index, token_id in enumerate(ids) if token_id != bos), len(ids))
        return [bos, *ids[first:]] if first != 1 else ids  # type: ignore[list-item]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; broken UTF-8 becomes U+FFFD."""
        if self.kind is TextKind.OTHER:
            known = [token_id for token_id in token_ids if self.backend.id_to_token(token_id) is not None]
            return str(self.backend.decode(known, skip_special_tokens=skip_special_tokens))
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        table = self.token_bytes
        text = b"".join([table[token_id] for token_id in token_ids if token_id not in skipped]).decode(errors="replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_text(self, token_id: int) -> str:
        """Return one token's text by itself, special tokens included."""
        piece = self._pieces[False][token_id]
        return self.token_bytes[token_id].decode(errors="replace") if piece is None else piece

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id
