"""`SamplingParams`: what one request asks of generation, with the names that users of vLLM and OpenAI know.

The record checks everything that needs no model: types, finiteness and ranges (written so that NaN fails). Limits that
depend on the model or the operator (vocabulary, context, maximum ``logprobs``) are checked by ``frontend.validation``.
The engine trusts a record that left the edge.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from headrace.base.errors import InvalidRequestError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORDS = 128
SEED_LIMIT = 1 << 63


class RequestOutputKind(str, Enum):
    """What each yielded output holds: all so far, only what is new, or one final output."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class ReasoningSpan(msgspec.Struct, frozen=True):
    """The reasoning part that precedes a constrained output: its marks, and whether the prompt has opened it already.

    One that is not open yet may be left out by the model.
    """

    start: str
    end: str
    open: bool


class StructuredOutputParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one way of constraining the output is set; with ``reasoning`` it holds for what follows that part.

    ``json`` is a JSON schema and ``structural_tag`` a JSON object, kept as text but also taken as Python values;
    ``grammar`` is Lark.

    Raises:
        InvalidRequestError: a value of another type.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    reasoning: ReasoningSpan | None = None

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            value: Any = getattr(self, name)
            if isinstance(value, (dict, bool)):
                msgspec.structs.force_setattr(self, name, msgspec.json.encode(value).decode())
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        for name in ("json", "regex", "grammar", "structural_tag"):
            if not isinstance(getattr(self, name), (str, NoneType)):
                raise InvalidRequestError(f"structured_outputs.{name} must be text", param=f"structured_outputs.{name}")
        choice: Any = self.choice
        if choice is not None and not (isinstance(choice, tuple) and all(isinstance(text, str) for text in choice)):
            raise InvalidRequestError("structured_outputs.choice must hold texts", param="structured_outputs.choice")


class Range(NamedTuple):
    """The legal numbers of a field: from ``low`` (itself only if not ``open_low``) to ``high``."""

    low: float
    high: float | None
    whole: bool
    open_low: bool = False


RANGES: dict[str, Range] = {
    "n": Range(1, MAX_N, True),
    "temperature": Range(0.0, 2.0, False),
    "top_p": Range(0.0, 1.0, False, open_low=True),
    "top_k": Range(-1, None, True),
    "min_p": Range(0.0, 1.0, False),
    "presence_penalty": Range(-2.0, 2.0, False),
    "frequency_penalty": Range(-2.0, 2.0, False),
    "repetition_penalty": Range(0.0, 1e6, False, open_low=True),
    "seed": Range(-SEED_LIMIT, SEED_LIMIT - 1, True),
    "min_tokens": Range(0, None, True),
    "max_tokens": Range(0, None, True),
    "logprobs": Range(-1, None, True),
    "prompt_logprobs": Range(-1, None, True),
}
"""The ranges of all numbers, for checks and for pages that describe them."""
_MAY_BE_ABSENT = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


def _check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise unless ``value`` is a number in [low, high] (or (low, high]); NaN and infinities fail."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if ok:
        ok = (low < value <= high) if open_low else (low <= value <= high)
    if not ok:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be a number in {bracket}{low:g}, {high:g}]", param=name)


def _check_int(name: str, value: Any, low: float, high: float | None = None) -> None:
    """Raise unless ``value`` is an int of at least ``low`` and at most ``high``."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not ok:
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be an integer {limit}", param=name)


def _check_ids(name: str, token_ids: Collection[Any]) -> None:
    """Raise unless all are ints of at least 0. There may be very many, so they are looked at together."""
    if set(map(type, token_ids)) == {int}:
        _check_int(name, min(token_ids), 0)
    else:
        for token_id in token_ids:
            _check_int(name, token_id, 0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one request.

    ``max_tokens=None`` means the room that the context leaves. ``logprobs=k`` returns the chosen token and the ``k``
    best ones; ``-1`` means the whole vocabulary, as far as the operator allows. ``top_k`` 0 or -1 means no limit.
    ``seed=None`` is replaced by a recorded random seed at the edge.

    Raises:
        InvalidRequestError: a value out of its range, with the field named.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._coerce()
        for name, (low, high, whole, open_low) in RANGES.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_ABSENT:
                continue
            if whole:
                _check_int(name, value, low, high)
            else:
                assert high is not None
                _check_range(name, value, low, high, open_low=open_low)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens", param="min_tokens")
        self._check_lists()

    def _coerce(self) -> None:
        """Accept what Python callers write: a single string for ``stop``, any sequence for the tuples."""
        coerced: dict[str, Any] = {}
        if self.stop is None:  # type: ignore[comparison-overlap]
            coerced["stop"] = ()
        elif isinstance(self.stop, str):
            coerced["stop"] = (self.stop,)
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = coerced.get(name, getattr(self, name))
            if value is None and name != "allowed_token_ids":
                coerced[name] = ()
            elif isinstance(value, (list, set, frozenset, range)):
                coerced[name] = tuple(value)
            elif value is not None and not isinstance(value, tuple):
                raise InvalidRequestError(f"{name} must be a list", param=name)
        for name, value in coerced.items():
            msgspec.structs.force_setattr(self, name, value)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
                message = f"stop strings must be non-empty strings of at most {MAX_STOP_STRING_CHARS} characters"
                raise InvalidRequestError(message, param="stop")
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize", param="stop")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad words are allowed", param="bad_words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidRequestError("bad words must be strings that are not blank", param="bad_words")
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check_ids(name, getattr(self, name) or ())
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        _check_ids("logit_bias", self.logit_bias or {})
        for bias in (self.logit_bias or {}).values():
            _check_range("logit_bias", bias, -100.0, 100.0)
