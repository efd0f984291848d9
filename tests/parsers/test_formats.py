"""What each format's parser makes of the texts that models write."""

from __future__ import annotations

import json

import pytest

from headrace.base.errors import ConfigError
from headrace.frontend.parsers.answer_parser import AnswerParser
from headrace.frontend.parsers.json_lists import ArrayParser, NamedParser
from headrace.frontend.parsers.reasoning import ReasoningParser
from headrace.frontend.parsers.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    get_reasoning_format,
    get_tool_format,
)
from tests.parsers.test_cuts import TOOLS, parse

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TAGGED = (
    "<tool_call>\n<function=say>\n<parameter=text>\n12\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
ADD = ("add", '{"a": 1}')

CASES = {
    "hermes": [
        (ONE, "", [ADD]),
        (f"{ONE}\n{ONE}", "", [ADD, ADD]),
        (f"Sure. {ONE}", "Sure.", [ADD]),
        (f"Sure. {ONE}\n\nDone.\n", "Sure.Done.\n", [ADD]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "add"}', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}', "", [("add", '{"a": "</tool_call>"}')]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
        ('<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        ("<tool_call> not JSON </tool_call>", "<tool_call> not JSON </tool_call>", []),
        ("a < b <tool", "a < b <tool", []),
    ],
    "qwen3": [
        (ONE, "", [ADD]),
        (TAGGED, "", [("say", '{"text": "12", "n": 3}')]),
        (f"Well: {TAGGED}{TAGGED}", "Well:", [("say", '{"text": "12", "n": 3}')] * 2),
        ("<tool_call><function=add></function></tool_call>", "", [("add", "{}")]),
        (
            '<tool_call><function=say><parameter=n>NaN</parameter><parameter=text>"\\ud83d"</parameter></function>',
            "",
            [("say", '{"n": "NaN", "text": "\\"\\\\ud83d\\""}')],
        ),
        ("<tool_call>\n<function=other>\n</function>", "<tool_call>\n<function=other>\n</function>", []),
    ],
    "llama3_json": [
        ('{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "say", "parameters": {}}', "", [ADD, ("say", "{}")]),
        ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
        ('I would call {"name": "add"}', 'I would call {"name": "add"}', []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "say"}]', "", [ADD, ("say", "{}")]),
        ('Yes.[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]say[ARGS]{}', "Yes.", [ADD, ("say", "{}")]),
        ('[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}', "", [ADD]),
        ("[TOOL_CALLS]other{}", "[TOOL_CALLS]other{}", []),
    ],
    "pythonic": [
        ("[add(a=1)]", "", [ADD]),
        ('[add(a=1), say(text="a)]", n=-2)]', "", [ADD, ("say", '{"text": "a)]", "n": -2}')]),
        ('[say(text="a\\/b", n=[true, null])]', "", [("say", '{"text": "a/b", "n": [true, null]}')]),
        ("[say(text='\\ud83d')]", "", [("say", '{"text": "\\ud83d"}')]),
        ('[say(text="\\ud83d\\ude00", n=None)]', "", [("say", '{"text": "😀", "n": null}')]),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[other(a=1)]", "[other(a=1)]", []),
        ("[add(__import__('os'))]", "[add(__import__('os'))]", []),
        ("No calls.", "No calls.", []),
    ],
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_models_write(name: str) -> None:
    """B074."""
    for text, content, calls in CASES[name]:
        assert parse(lambda: TOOL_FORMATS.get(name).make(TOOLS), [text]) == (content, calls), text


def test_what_grammars_enforce() -> None:
    text = '[{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {"text": "]"}}]'
    assert parse(lambda: ArrayParser(TOOLS), [text]) == ("", [ADD, ("say", '{"text": "]"}')])
    assert parse(lambda: ArrayParser(TOOLS), [text[:30]]) == ("", [("add", "")]), "cut before the arguments"
    assert parse(lambda: NamedParser("add"), [' {"a": 1}\n']) == ("", [("add", '{"a": 1}')])
    assert parse(lambda: NamedParser("add"), ['{"a"']) == ("", [("add", '{"a"')])


@pytest.mark.parametrize(
    ("form", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>a b</think>c", "a b", "c"),
        ("qwen3", "", "<think>\na\n</think>\n\nc ", "a", "c "),
        ("qwen3", "", "no marks", "", "no marks"),
        ("qwen3", "", "a</think>b </think>", "", "ab </think>"),
        ("qwen3", "", "<think>never ends", "never ends", ""),
        ("qwen3", "x<think>\n", "a</think>c", "a", "c"),
        ("qwen3", "<think>\n\n</think>\n\n", "a</think>c", "", "a</think>c"),
        ("qwen3", "", "<think></think>c", "", "c"),
        ("qwen3", "", "a < b <thin </thi", "", "a < b <thin </thi"),
        ("deepseek_r1", "", "a</think>c", "a", "c"),
        ("deepseek_r1", "", "<think>a</think>c", "a", "c"),
        ("deepseek_r1", "", "never ends", "never ends", ""),
    ],
)
def test_reasoning(form: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    """B079."""
    parser = ReasoningParser(REASONING_FORMATS.get(form), prompt)
    first, second = parser.feed(text), parser.finish()
    assert (first[0] + second[0], first[1] + second[1]) == (reasoning, content)


def test_reasoning_tokens_do_not_depend_on_the_cuts() -> None:
    text = "<think>ab</think> cd"
    for size in (1, 2, 3, 7, 100):
        parser = AnswerParser(
            ReasoningParser(REASONING_FORMATS.get("qwen3"), ""), None, True, lambda ids: [text[i] for i in ids]
        )
        for place in range(0, len(text), size):
            ids = list(range(place, min(len(text), place + size)))
            parser.feed(text[place : place + size], ids, place + size >= len(text))
        assert parser.num_reasoning_tokens == len("<think>ab</think>")


def test_only_the_first_call_counts_without_parallel_ones() -> None:
    parser = AnswerParser(None, TOOL_FORMATS.get("hermes").make(TOOLS), False, lambda ids: [])
    delta = parser.feed(f"{ONE}{ONE}", [], True)
    assert [(call.index, call.name) for call in delta.calls] == [(0, "add")]
    assert json.loads(delta.calls[0].arguments) == {"a": 1}


def test_formats_are_chosen_by_the_template_or_by_name() -> None:
    hermes = TOOL_FORMATS.get("hermes")
    assert get_tool_format("template", "") is hermes
    assert get_tool_format("template", "{{ '<tool_call>' }}") is hermes
    assert get_tool_format("template", "<tool_call><function=") is TOOL_FORMATS.get("qwen3")
    assert get_tool_format("pythonic", "<tool_call>") is TOOL_FORMATS.get("pythonic")
    assert get_reasoning_format("template", "") is None
    assert get_reasoning_format("none", "</think>") is None
    assert get_reasoning_format("template", "<think></think>") is REASONING_FORMATS.get("qwen3")
    for get in (get_tool_format, get_reasoning_format):
        with pytest.raises(ConfigError, match="known: "):
            get("nope", "")
