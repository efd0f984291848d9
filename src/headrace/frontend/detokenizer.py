"""Token ids to text, a few at a time.

The joined pieces of an answer equal the decoding of all its ids at once, in the context of the prompt. Bytes that do
not yet make a character are held until they do, or until `flush`. The prompt is context only: it settles whether a
first space belongs to the text and completes a character that it left open, but none of its text is ever returned.

Work per token is constant: a table gives the text of nearly every token, and the rest goes through a UTF-8 decoder
with at most three pending bytes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from headrace.frontend.tokenizer import TextKind, Tokenizer

_LONGEST_CHAR_BYTES = 4
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns the ids of one answer into text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that is now certain."""
        ...

    def flush(self) -> str:
        """Return what incomplete bytes become at the end."""
        ...


class NullDetokenizer:
    """For requests that want no text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes."""

    __slots__ = ("_at_start", "_bytes", "_from_prompt", "_pending", "_pieces")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._bytes = tokenizer.token_bytes
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if self._pieces[token_id] != "":
                tail = self._bytes[token_id] + tail
            if len(tail) >= _LONGEST_CHAR_BYTES:
                break
        self._at_start = tokenizer.strips_first_space and not tail
        self._pending = tail[utf_8_decode(tail, "replace", False)[1] :]
        self._from_prompt = bool(self._pending)

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        text = ""
        for token_id in token_ids:
            piece = pieces[token_id]
            if piece is None or (self._pending and piece):
                piece = self._decode_bytes(self._bytes[token_id])
            if self._at_start and piece:
                self._at_start = False
                piece = piece.removeprefix(" ")
            text += piece
        return text

    def _decode_bytes(self, data: bytes) -> str:
        if self._from_prompt:
            self._from_prompt = False
            try:
                utf_8_decode(self._pending + data[:1], "strict", False)
            except UnicodeDecodeError:
                # The character that the prompt left open stays broken; that is the prompt's text, not the answer's.
                self._pending = b""
        data = self._pending + data
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return "" if self._from_prompt else pending.decode(errors="replace")


class ContextDetokenizer:
    """For any other vocabulary: decodes each new token together with the few before it and takes the difference."""

    __slots__ = ("_context", "_context_text", "_new", "_skip", "_tokenizer")
    _CONTEXT_TOKENS = 6
    _MOST_HELD_TOKENS = 8

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._new: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._shows(token_id):
                self._context.insert(0, token_id)
            if len(self._context) == self._CONTEXT_TOKENS:
                break
        self._context_text = tokenizer.decode(self._context, skip_special_tokens)

    def _shows(self, token_id: int) -> bool:
        return not (self._skip and token_id in self._tokenizer.special_token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([self._decode_one(token_id) for token_id in token_ids if self._shows(token_id)])

    def _decode_one(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._tokenizer.decode(self._context + self._new, self._skip)
        if text.endswith(_REPLACEMENT) and len(self._new) < self._MOST_HELD_TOKENS:
            return ""
        return self._release(text)

    def _release(self, text: str) -> str:
        delta = text[len(self._context_text) :]
        self._context = (self._context + self._new)[-self._CONTEXT_TOKENS :]
        self._new = []
        self._context_text = self._tokenizer.decode(self._context, self._skip)
        return delta

    def flush(self) -> str:
        return self._release(self._tokenizer.decode(self._context + self._new, self._skip)) if self._new else ""


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
) -> Detokenizer:
    """Return the detokenizer for one answer to a prompt; without a tokenizer it gives no text."""
    if tokenizer is None:
        return NullDetokenizer()
    if tokenizer.kind is TextKind.OTHER:
        return ContextDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    return ByteDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)


def split_text(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
    """Return one text per token whose join is the decoding of all of them.

    A token that leaves a character open has an empty text; the one that completes it has the character.
    """
    detokenizer = make_detokenizer(tokenizer, (), skip_special_tokens)
    texts = [detokenizer.decode((token_id,)) for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.flush()
    return texts
