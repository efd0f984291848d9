"""Prompts that a seed decides, with or without a prefix that several of them share.

Texts are made of short English words, which tokenizers of English models keep whole, so that a text of N words has
about N tokens; the server's own count is what reports show. Token ids are exact, and drawn from the upper part of the
vocabulary's first thousands, where no model keeps its special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T", str, int)

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body information back parent face level "
    "office door health person art war history party result change morning reason research girl guy moment air teacher"
)
_FIRST_ID, _LAST_ID = 1000, 8000


@dataclass(frozen=True, slots=True)
class PromptShape:
    """Lengths in tokens (or words).

    Attributes:
        num_tokens: length of each prompt, its prefix not counted.
        spread: lengths are uniform in ``num_tokens * (1 - spread)`` to ``num_tokens * (1 + spread)``.
        prefix_tokens: length of the shared prefix.
        num_prefixes: different prefixes, taken in turn.
    """

    num_tokens: int
    spread: float = 0.0
    prefix_tokens: int = 0
    num_prefixes: int = 1


def make_texts(num_prompts: int, shape: PromptShape, seed: int) -> list[str]:
    """Prompts as text."""
    return [" ".join(words) for words in _make(num_prompts, shape, seed, _TEXT.split())]


def make_token_ids(num_prompts: int, shape: PromptShape, seed: int, vocab_size: int | None = None) -> list[list[int]]:
    """Prompts as token ids below ``vocab_size``."""
    last = min(_LAST_ID, vocab_size or _LAST_ID)
    return _make(num_prompts, shape, seed, range(min(_FIRST_ID, last // 2), last))


def spread_lengths(num: int, mean: int, spread: float, seed: int) -> list[int]:
    """Lengths around ``mean``, at least 1."""
    random = Random(f"lengths-{seed}")
    return [max(1, round(mean * (1.0 + spread * random.uniform(-1.0, 1.0)))) for _ in range(num)]


def _make(num_prompts: int, shape: PromptShape, seed: int, pool: Sequence[T]) -> list[list[T]]:
    random = Random(f"prompts-{seed}")
    prefixes = [random.choices(pool, k=shape.prefix_tokens) for _ in range(shape.num_prefixes)]
    lengths = spread_lengths(num_prompts, shape.num_tokens, shape.spread, seed)
    return [
        prefixes[index % shape.num_prefixes] + random.choices(pool, k=length) for index, length in enumerate(lengths)
    ]
