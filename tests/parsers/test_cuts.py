"""Every way of cutting a text gives what the whole text gives, for every parser."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.sections import LimitsSection
from headrace.frontend.parsers.events import ParsedDelta, ToolParser
from headrace.frontend.parsers.json_lists import ArrayParser, NamedParser
from headrace.frontend.parsers.reasoning import ReasoningParser
from headrace.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from headrace.frontend.tools import plan_tools

TOOLS = plan_tools(
    [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}},
        {
            "type": "function",
            "function": {
                "name": "say",
                "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}},
            },
        },
    ],
    None,
    None,
    LimitsSection(),
).tools

MAKERS: dict[str, Callable[[], ToolParser]] = {
    **{name: (lambda name=name: TOOL_FORMATS.get(name).make(TOOLS)) for name in TOOL_FORMATS},  # type: ignore[misc]
    "array": lambda: ArrayParser(TOOLS),
    "named": lambda: NamedParser("add"),
}
PIECES = [
    "<tool_call>", "</tool_call>", "<tool_", "<function=", "<function=say>", "</function>", "<parameter=text>",
    "<parameter=n>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[", "]", "{", "}",
    '{"name": "add", "arguments": {"a": 1}}', '{"arguments": {"a": [1, "}"]}, "name": "say"}', '{"name": "nope"}',
    '{"name": "add", "parameters": "{\\"a\\": 2}"}', '"name"', "add", "say", "(", ")", "=", "add(a=1)",
    'say(text="a)\\"b", n=[1, 2])', "'", '"', "\\", ",", ";", ":", " ", "\n", "  \n", "a", "é", "<", "1", "null",
    "<think>", "</think>", "<th", "ink>", '"\\ud83d"', "say(text='\\ud83d')", "NaN", "null", "true",
    '{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def joined(deltas: list[ParsedDelta]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls; the rules of the stream are checked on the way."""
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.arguments
            # What cannot be encoded cannot be sent.
            call.arguments.encode()
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls]


def parse(make: Callable[[], ToolParser], pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = make()
    return joined([*map(parser.feed, pieces), parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", list(MAKERS))
@given(text=TEXTS, places=st.lists(st.integers(0, 500), max_size=12))
@settings(max_examples=120, deadline=None)
def test_every_cut_gives_the_whole(name: str, text: str, places: list[int]) -> None:
    whole = parse(MAKERS[name], [text])
    assert parse(MAKERS[name], cut(text, places)) == whole
    assert parse(MAKERS[name], list(text)) == whole


@pytest.mark.parametrize("name", list(MAKERS))
@given(text=st.text(alphabet="abc <>[]é\n", max_size=40))
@settings(max_examples=60, deadline=None)
def test_text_without_calls_is_kept_as_it_is(name: str, text: str) -> None:
    if name in ("named", "array") and text.lstrip().startswith(("[", "{")):
        return
    content, calls = parse(MAKERS[name], [text])
    if name != "named":
        assert (content, calls) == (text, [])


@pytest.mark.parametrize("name", REASONING_FORMATS.names())
@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 500), max_size=12),
    prompt=st.sampled_from(["", "Hi<think>\n", "<think>\n\n</think>\n"]),
)
@settings(max_examples=120, deadline=None)
def test_every_cut_gives_the_same_reasoning(name: str, text: str, places: list[int], prompt: str) -> None:
    def split(pieces: list[str]) -> tuple[str, str, int]:
        parser = ReasoningParser(REASONING_FORMATS.get(name), prompt)
        made = [*map(parser.feed, pieces), parser.finish()]
        return "".join(a for a, _ in made), "".join(b for _, b in made), parser.num_chars

    whole = split([text])
    assert split(cut(text, places)) == whole
    assert split(list(text)) == whole
