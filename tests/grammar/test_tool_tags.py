"""Calls that a model writes of its own accord: what the tags of each format allow is what its parser reads as calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection
from headrace.core.grammar_backend import GrammarError, compile_grammar
from headrace.core.grammar_source import make_source
from headrace.frontend.parsers.registry import TOOL_FORMATS
from headrace.frontend.tools import ToolPlan, plan_tools
from headrace.messages.sampling_params import ReasoningSpan, StructuredOutputParams
from tests.grammar.test_backend import BYTES, END, TOKENIZER, allowed, takes
from tests.parsers.test_cuts import parse

PARAMETERS = {
    "type": "object",
    "properties": {
        "tag": {"type": "string", "maxLength": 3},
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"$ref": "#/$defs/kind"},
        "more": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2},
    },
    "required": ["a", "kind"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["x", "y/z", "é"]}},
}


def plan(*functions: dict[str, Any]) -> ToolPlan:
    tools = [{"type": "function", "function": function} for function in functions]
    return plan_tools(tools, None, None, LimitsSection())


ADD = {"name": "add", "strict": True, "parameters": PARAMETERS}
FREE = {"name": "free", "strict": True, "parameters": {"type": "object", "properties": {"b": {"type": "boolean"}}}}
PLAN = plan(ADD, FREE)

GOOD_ARGUMENTS = '{"a": 1, "kind": "x"}'
# form: beginnings of calls, texts that pass, texts that do not
TEXTS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "hermes": (
        ["<tool_call>", "Well. <tool_call>"],
        ["a < b", f'So: <tool_call>\n{{"name": "add", "arguments": {GOOD_ARGUMENTS}}}\n</tool_call> and so on'],
        ['<tool_call>\n{"name": "add", "arguments": {"a": 100', '<tool_call>\n{"name": "nope"', "<tool_call>{"],
    ),
    "llama3_json": (
        ["{", " \n{", "<|python_tag|>{"],
        ["So {", "[1]", f'{{"name": "add", "parameters": {GOOD_ARGUMENTS}}}; {{"name": "free", "parameters": {{}}}}'],
        ['{"name": "add", "parameters": {"a": "1"', '{"age": 3}', '<|python_tag|>{"a"', "<|python_tag|>text"],
    ),
    "mistral": (
        ["[TOOL_CALLS]", "Yes.[TOOL_CALLS] [", "[TOOL_CALLS]add"],
        ["[TOOL", f"[TOOL_CALLS]add{GOOD_ARGUMENTS}", f"[TOOL_CALLS]add[ARGS]{GOOD_ARGUMENTS}[TOOL_CALLS]free{{}}",
         f'[TOOL_CALLS][{{"name": "add", "arguments": {GOOD_ARGUMENTS}}}]'],
        ["[TOOL_CALLS]nope", "[TOOL_CALLS]add{}", '[TOOL_CALLS][{"name": "add", "arguments": {"a": -1'],
    ),
    "pythonic": (
        ["[", "\n["],
        ["So [1]", '[add(a=1, kind="é")]', '[add(a=1, kind="y/z", tag="t", more=[true, null]), free(b=false, )]',
         "[free()]"],
        ["[1, 2]", "[add()]", '[add(a=1, kind="q")]', '[add(kind="x", a=1)]', "[nope()]"],
    ),
}  # fmt: skip
TEXTS["qwen3"] = TEXTS["hermes"]


def constraint(form: str, of: ToolPlan = PLAN) -> StructuredOutputParams:
    made = of.constraint(TOOL_FORMATS.get(form).tag)
    assert made is not None
    return made


def is_good(name: str, arguments: dict[str, Any]) -> bool:
    if name == "free":
        return isinstance(arguments.get("b", True), bool)
    return (
        set(arguments) <= set(PARAMETERS["properties"])  # type: ignore[call-overload]
        and arguments["kind"] in ("x", "y/z", "é")
        and type(arguments["a"]) is int
        and 0 <= arguments["a"] <= 99
        and len(arguments.get("tag", "").encode("utf-16-le", "surrogatepass")) <= 6 * 2
        and all(item in (True, False, None) for item in arguments.get("more", []))
    )


def test_every_format_is_tried() -> None:
    assert set(TEXTS) == set(TOOL_FORMATS.names())


@pytest.mark.parametrize("form", list(TEXTS))
def test_what_passes(form: str) -> None:
    _, good, bad = TEXTS[form]
    asked = constraint(form)
    assert [text for text in good if not takes(asked, text)] == []
    for text in bad:
        matcher = compile_grammar(asked, TOKENIZER).make_matcher()
        # Its tokens are refused on the way, or it cannot end where it does.
        refused = matcher.accept(BYTES.encode(text).ids) is not None
        assert refused or END not in allowed(matcher), text


@pytest.mark.parametrize("form", list(TEXTS))
def test_whatever_passes_is_read_as_calls_that_hold_to_their_schemas(form: str) -> None:
    asked, random_ = constraint(form), random.Random(5)
    grammar = compile_grammar(asked, TOKENIZER)
    ended = 0
    for _ in range(40):
        matcher = grammar.make_matcher()
        ids = BYTES.encode(random_.choice(TEXTS[form][0])).ids
        assert matcher.accept(ids) is None
        while len(ids) < 220 and (not ids or ids[-1] != END):
            choices = sorted(allowed(matcher))
            token_id = END if END in choices else random_.choice(choices)
            assert matcher.accept([token_id]) is None
            ids = [*ids, token_id]
        if ids[-1] != END:
            continue
        ended += 1
        content, calls = parse(lambda: TOOL_FORMATS.get(form).make(PLAN.tools), [BYTES.decode(ids)])
        assert content.strip() in ("", "Well.", "Yes.")
        assert calls
        for name, arguments in calls:
            assert is_good(name, json.loads(arguments)), (name, arguments)
    assert ended > 10


@pytest.mark.parametrize("form", list(TEXTS))
def test_a_tag_begins_after_the_reasoning(form: str) -> None:
    asked = constraint(form)
    span = ReasoningSpan("<think>", "</think>", True)
    behind = StructuredOutputParams(structural_tag=asked.structural_tag, reasoning=span)
    assert [text for text in TEXTS[form][1] if not takes(behind, f"so [{{</think>{text}")] == []
    assert not takes(behind, f"so</think>{TEXTS[form][2][0]}")


@pytest.mark.parametrize("form", sorted(TEXTS.keys() - {"llama3_json"}))
def test_calls_or_json_and_nothing_else(form: str) -> None:
    tag = json.loads(constraint(form).structural_tag or "")
    schema = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    asked = StructuredOutputParams(structural_tag=json.dumps({**tag, "otherwise": schema}))
    calls = [text for text in TEXTS[form][1] if text.startswith(("[TOOL_CALLS]", "[add", "[free"))]
    if not calls:
        one = f'<tool_call>\n{{"name": "add", "arguments": {GOOD_ARGUMENTS}}}\n</tool_call>'
        calls = [one, f"{one}\n{one}", one + one]
    assert [text for text in [*calls, '{"b": true}'] if not takes(asked, text)] == []
    assert [text for text in ("", "prose", '{"b": 1}', "{}", *TEXTS[form][2]) if takes(asked, text)] == []
    # No way to go on for ever between strings.
    matcher = compile_grammar(asked, TOKENIZER).make_matcher()
    (blank,) = BYTES.encode(" ").ids
    assert matcher.accept(BYTES.encode('{"b":').ids) is None
    blanks = 0
    while blank in allowed(matcher):
        assert matcher.accept([blank]) is None
        blanks += 1
        assert blanks < 60


def test_marks_that_are_tokens_are_followed_as_tokens() -> None:
    marks = {"<|python_tag|>": 7, "[TOOL_CALLS]": 8, "[ARGS]": 9, "<tool_call>": 10, "</tool_call>": 11}
    for form, numbers in (("llama3_json", [7]), ("mistral", [8, 9]), ("hermes", [10, 11])):
        source = make_source(constraint(form), marks)
        for number in numbers:
            assert f"<[{number}]>" in source
        compile_grammar(constraint(form), TOKENIZER)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"no-word": {"type": "string"}}},
        {"type": "object", "properties": {"class": {"type": "string"}}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "patternProperties": {"^a": {}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
    ],
)
def test_what_cannot_be_written_as_keyword_arguments_is_refused_by_name(parameters: dict[str, Any]) -> None:
    asked = plan({"name": "ok", "parameters": {}}, {"name": "f", "strict": True, "parameters": parameters})
    with pytest.raises(InvalidRequestError, match="pythonic") as caught:
        constraint("pythonic", asked)
    assert caught.value.param == "tools[1].function.strict"
    for form in TEXTS.keys() - {"pythonic"}:
        compile_grammar(constraint(form, asked), TOKENIZER)


def test_functions_that_are_not_strict_take_any_arguments() -> None:
    asked = plan({"name": "loose", "parameters": PARAMETERS}, ADD)
    for form, text in (
        ("hermes", '<tool_call>\n{"name": "loose", "arguments": {"q": [1]}}\n</tool_call>'),
        ("llama3_json", '{"name": "loose", "parameters": {"q": [1]}}'),
        ("mistral", '[TOOL_CALLS]loose{"q": [1]}'),
    ):
        assert takes(constraint(form, asked), text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "{", "<t>", "a\nb", "/", "\x07", "object"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["schema", "parts", "begin", "end", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_STRUCTURE = st.fixed_dictionaries(
    {"begin": _JSON, "end": _JSON}, optional={"schema": _JSON, "parts": _JSON | st.lists(_JSON, max_size=3)}
)
_TAG = st.fixed_dictionaries(
    {"structures": _JSON | st.lists(_STRUCTURE, min_size=1, max_size=2)},
    optional={
        "triggers": _JSON | st.just(["<t>", "{"]),
        "otherwise": _JSON,
        "at_start": _JSON
        | st.fixed_dictionaries({"separator": _JSON}, optional=dict.fromkeys(("lead", "opening", "closing"), _JSON)),
    },
)


@given(tag=_TAG)
@settings(max_examples=300, deadline=None)
def test_whatever_is_sent_as_a_tag_is_a_grammar_or_refused(tag: Any) -> None:
    """B064."""
    try:
        source = make_source(StructuredOutputParams(structural_tag=json.dumps(tag)), {"<t>": 3})
    except InvalidRequestError as error:
        assert error.param == "structured_outputs.structural_tag"
        return
    try:
        compile_grammar(StructuredOutputParams(structural_tag=json.dumps(tag)), TOKENIZER)
    except (GrammarError, InvalidRequestError):
        return
    assert json.loads(source)
