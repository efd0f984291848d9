"""The grammar library sees the model's tokens as the detokenizer does, and every kind of constraint is enforced."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers

from headrace.base.errors import InvalidRequestError
from headrace.core.grammar_backend import GrammarError, GrammarTokenizer, LLGuidanceMatcher, compile_grammar
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.sampling_params import ReasoningSpan, StructuredOutputParams
from tests.grammar.vocabularies import byte_fallback, byte_level, grammar_tokenizer

BYTES = byte_level()
EXTRA = 37
TOKENIZER = grammar_tokenizer(BYTES, "<end>", extra=EXTRA)
END = BYTES.token_to_id("<end>")


def matcher_of(params: StructuredOutputParams, tokenizer: GrammarTokenizer = TOKENIZER) -> LLGuidanceMatcher:
    return compile_grammar(params, tokenizer).make_matcher()


def allowed(matcher: LLGuidanceMatcher, tokenizer: GrammarTokenizer = TOKENIZER) -> set[int]:
    words = np.zeros(tokenizer.num_words, dtype=np.int32)
    assert matcher.fill_mask(words) is None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def takes(params: StructuredOutputParams, text: str) -> bool:
    """Whether a text and its end pass, with every token allowed by the mask before it."""
    matcher = matcher_of(params)
    for token_id in [*BYTES.encode(text).ids, END]:
        if token_id not in allowed(matcher):
            return False
        assert matcher.accept([token_id]) is None
    return True


@pytest.mark.parametrize(("make", "eos"), [(byte_level, "<end>"), (byte_fallback, "</s>")])
def test_each_token_stands_for_the_bytes_that_the_detokenizer_gives(make: Any, eos: str) -> None:
    backend: tokenizers.Tokenizer = make()
    seen, ours = grammar_tokenizer(backend, eos, extra=EXTRA), Tokenizer(backend)
    special = set(backend.get_added_tokens_decoder())
    for token_id in range(backend.get_vocab_size()):
        expected = b"" if token_id in special else ours.token_bytes[token_id]
        if expected == b"\xff":
            continue  # In no text: the library marks special tokens with it.
        assert seen.token_bytes(token_id) == expected, (token_id, backend.id_to_token(token_id))
    assert {i for i in range(seen.backend.vocab_size) if seen.backend.is_special_token(i)} >= special


def test_the_width_is_that_of_the_logits_and_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    anything = allowed(matcher_of(StructuredOutputParams(regex="(.|\n)*")))
    assert TOKENIZER.backend.vocab_size == BYTES.get_vocab_size() + EXTRA
    assert max(anything) < BYTES.get_vocab_size()
    special = {BYTES.token_to_id("<end>"), BYTES.token_to_id("<other>")}
    assert anything & special == {END}, "special tokens are no text"
    assert len(anything) > 128, "all of ASCII, and what begins other characters"


def test_every_id_that_ends_a_text_may_end_it() -> None:
    tokenizer = grammar_tokenizer(BYTES, "<end>", "<other>")
    matcher = matcher_of(StructuredOutputParams(choice=("ab",)), tokenizer)
    assert matcher.accept(BYTES.encode("ab").ids) is None
    assert allowed(matcher, tokenizer) == {BYTES.token_to_id("<end>"), BYTES.token_to_id("<other>")}
    assert matcher.accept([BYTES.token_to_id("<other>")]) is None
    assert allowed(matcher, tokenizer), "a request that ignores the end goes on with it"
    assert matcher.accept([END]) is None


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(GrammarError, match="ends a text"):
        grammar_tokenizer(BYTES)


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"choice": ("yes", "no", "né", 'a"b\\')}, ["yes", "né", 'a"b\\'], ["ye", "maybe", ""]),
        ({"regex": "[a-c]{2}/\\d"}, ["ab/1"], ["ab1", "abc/1", "ab/1 "]),
        ({"regex": "^ab$"}, ["ab"], ["xab"]),
        ({"grammar": 'start: "a" b+\nb: "b" | "c"'}, ["ab", "abcb"], ["a", "b"]),
        ({"json_object": True}, ["{}", '{"a": [1, {}]}'], ["[]", "1", '"a"']),
        ({"json": '{"type": "integer", "minimum": 0, "maximum": 30000000000}'}, ["0", "30000000000"], ["-1", "9" * 11]),
        ({"json": '{"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}'}, ["1.5", "0.1"], ["0", "1.6"]),
        ({"json": "true"}, ["1", "null", '"a"', "[]"], ["", "a"]),
        ({"json": '{"enum": ["é", 1, null]}'}, ['"é"', "1", "null"], ['"e"', "2"]),
        (
            {"json": json.dumps({"type": "array", "minItems": 2, "maxItems": 2, "items": {"$ref": "#/$defs/c"},
                                 "$defs": {"c": {"enum": ["red", "blue"]}}})},
            ['["red","blue"]'], ['["red"]', '["red","green"]'],
        ),
        (
            {"structural_tag": json.dumps({"triggers": ["<f"], "structures": [
                {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]})},
            ["plain", "a <f>12</f> b <f>3</f>"], ["<f>x</f>", "<f>1"],
        ),
    ],
)  # fmt: skip
def test_each_kind_is_enforced(params: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """B065, B070."""
    asked = StructuredOutputParams(**params)
    assert [text for text in good if not takes(asked, text)] == []
    assert [text for text in bad if takes(asked, text)] == []


KEYWORDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n[0-9]$": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"n1": 2}], [{"n1": "x"}, {"m": 1}],
    ),
    "additionalProperties": ({"type": "object", "additionalProperties": {"const": 2}}, [{"a": 2}], [{"a": 1}]),
    "minLength": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    "pattern": ({"type": "string", "pattern": "^[xy]{2}$"}, ["xy"], ["x", "xyx"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["soon", "2024-13-01"]),
    "items": ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[True]], [[], [1]]),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1]], [[2], [1, 1]]),
    "anyOf": ({"anyOf": [{"const": "k"}, {"type": "boolean"}]}, ["k", False], ["j", 1]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [True, None]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    "const": ({"const": {"k": [1, None]}}, [{"k": [1, None]}], [{"k": [1]}]),
    "type list": ({"type": ["null", "boolean"]}, [None, True], [0]),
    "multipleOf": ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99}, [7, 98], [8, 105]),
    "required": ({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "z"]},
                 [{"a": True, "z": 1}], [{"a": True}, {"z": 1}]),
    "minProperties": ({"type": "object", "additionalProperties": {}, "minProperties": 1}, [{"a": 1}], [{}]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(KEYWORDS))
def test_each_keyword_is_enforced(name: str) -> None:
    """B071."""
    schema, good, bad = KEYWORDS[name]
    asked = StructuredOutputParams(json=json.dumps(schema))
    assert [value for value in good if not takes(asked, json.dumps(value))] == []
    assert [value for value in bad if takes(asked, json.dumps(value))] == []


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "["}, "unclosed"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"json": '{"type": "string", "pattern": "(?=a)b"}'}, "look-around"),
        ({"json": '{"type": "string", "format": "made-up"}'}, "format"),
        ({"json": '{"type": "integer", "minimum": 9, "maximum": 3}'}, "minimum"),
        ({"json": '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'}, "oneOf"),
        ({"json": '{"$ref": "#"}'}, "satisfy"),
        ({"json": "false"}, "nsatisfiable"),
        ({"grammar": "start: nope"}, "nope"),
        ({"grammar": "not lark"}, "."),
    ],
)
def test_what_cannot_be_enforced_is_refused(params: dict[str, Any], word: str) -> None:
    """B064, B065, B068."""
    with pytest.raises(GrammarError, match=word) as caught:
        compile_grammar(StructuredOutputParams(**params), TOKENIZER)
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "regex", ["(a{1,200}b?){1,200}", "(.*a){25}", "(((a{100}){100}){100}){100}", "(a|b|ab)*c{5000}"]
)
def test_costly_expressions_stay_cheap_or_fail(regex: str) -> None:
    """B073."""
    try:
        matcher = matcher_of(StructuredOutputParams(regex=regex))
    except GrammarError:
        return
    words = np.zeros(TOKENIZER.num_words, dtype=np.int32)
    for token_id in BYTES.encode("abaabab" * 20).ids:
        if matcher.fill_mask(words) is not None:
            assert not words.any()
            return
        if matcher.accept([token_id]) is not None:
            return


@pytest.mark.parametrize("schema", ["{}", '{"type": "number"}', '{"type": "array"}'])
@pytest.mark.parametrize("favourite", ["1", " ", "0"])
def test_nothing_between_strings_goes_on_for_ever(schema: str, favourite: str) -> None:
    """B067."""
    matcher = matcher_of(StructuredOutputParams(json=schema))
    start = "[1" if "array" in schema else "1."
    assert matcher.accept(BYTES.encode(start).ids) is None
    (wanted,) = BYTES.encode(favourite).ids
    count = 0
    while wanted in allowed(matcher):
        assert matcher.accept([wanted]) is None
        count += 1
        assert count < 60
    assert allowed(matcher)


def test_long_runs_within_strings_are_free() -> None:
    asked = StructuredOutputParams(json='{"type": "string"}')
    assert takes(asked, json.dumps("1" * 100 + " " * 100 + '"' + "2" * 100))


@pytest.mark.parametrize(
    ("span", "good", "bad"),
    [
        (ReasoningSpan("<think>", "</think>", True), ["so </thi</think>12", "</think>\n\n12"], ["12", "a</think>b"]),
        (ReasoningSpan("<think>", "</think>", False), ["<think>so</think> 12", "12"], ["so</think>12", "<think>12"]),
        (ReasoningSpan("<x>", "<other>", True), ["so<other>12"], ["12", "so12"]),
        (ReasoningSpan("[r]", "[/r]", False), ["[r]so[/r]12", "12"], ["so[/r]12"]),
    ],
)
def test_the_constraint_begins_after_the_reasoning(span: ReasoningSpan, good: list[str], bad: list[str]) -> None:
    asked = StructuredOutputParams(json='{"type": "integer"}', reasoning=span)
    assert [text for text in good if not takes(asked, text)] == []
    assert [text for text in bad if takes(asked, text)] == []


def test_marks_that_are_tokens_are_followed_as_tokens() -> None:
    asked = StructuredOutputParams(regex="12", reasoning=ReasoningSpan("<x>", "<other>", True))
    matcher = matcher_of(asked)
    assert matcher.accept([*BYTES.encode("so").ids, BYTES.token_to_id("<other>"), *BYTES.encode("12").ids, END]) is None


def test_a_token_that_is_not_allowed_is_an_error_and_nothing_else() -> None:
    matcher = matcher_of(StructuredOutputParams(choice=("ab",)))
    error = matcher.accept(BYTES.encode("x").ids)
    assert error is not None and "does not allow" in error


def test_python_values_are_taken_as_well() -> None:
    schema = {"type": "integer"}
    assert StructuredOutputParams(json=schema) == StructuredOutputParams(json='{"type":"integer"}')  # type: ignore[arg-type]
    assert StructuredOutputParams(json=True).json == "true"  # type: ignore[arg-type]
    assert StructuredOutputParams(choice=["a"]).choice == ("a",)  # type: ignore[arg-type]
    wrong: list[dict[str, Any]] = [{"json": 5}, {"regex": 5}, {"grammar": b"a"}, {"choice": "ab"}, {"choice": [5]}]
    for fields in wrong:
        with pytest.raises(InvalidRequestError, match=next(iter(fields))):
            StructuredOutputParams(**fields)
