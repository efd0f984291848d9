"""Chat templates: what they see, what they may do, what a request gets when they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import ConfigError, InvalidRequestError
from headrace.frontend.chat import ChatTemplate

SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


def render(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_the_goldens_template(shared_dir: Path, goldens: list[dict[str, Any]]) -> None:
    template = ChatTemplate((shared_dir / "conformance" / "tokenizer" / "chat_template.jinja").read_text(), {})
    chats = [golden for golden in goldens if golden.get("messages")]
    assert chats
    for golden in chats:
        assert template.render(golden["messages"]) == golden["text_prompt"]


def test_helpers_that_templates_expect() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<\u00e9>'"}]) == json.dumps(
        [{"role": "user", "content": "<\u00e9>'"}], ensure_ascii=False
    )
    assert render("{{ {'a': 1} | tojson(indent=2) }}", [USER]) == '{\n  "a": 1\n}'
    assert render("{{ bos_token }}{{ eos_token }}", [USER]) == "<s></s>"
    assert render("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}", [USER]) == ""
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}", [USER]) == "Hi"
    clock = ManualClock(0.0)
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}, clock=clock).render([USER]) in ("1969", "1970")
    assert (
        render(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            [USER] * 3,
        )
        == "3"
    )


def test_a_templates_own_complaint_reaches_the_client() -> None:
    """B062."""
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", [USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}{{ messages }}",
    ],
)
def test_whatever_fails_inside_is_a_client_fault(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source, [USER])


def test_endless_templates_are_stopped() -> None:
    """B061: silent loops, writing loops and huge outputs."""
    silent = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    loud = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    for source in (silent, loud):
        with pytest.raises(InvalidRequestError, match="longer than"):
            ChatTemplate(source, {}, limit_s=0.2).render([USER])
    with pytest.raises(InvalidRequestError, match="longer than"):
        ChatTemplate(loud, {}, max_chars=1000).render([USER])
    with pytest.raises(InvalidRequestError):
        render("{% for i in range(10000000) %}{% endfor %}", [USER])


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "conversation", "return_tensors", "messages", "bos_token"]
)
def test_reserved_variables_are_refused(name: str) -> None:
    """B061."""
    with pytest.raises(InvalidRequestError, match=name):
        render(SIMPLE, [USER], chat_template_kwargs={name: True})


def test_only_variables_that_the_template_reads_are_passed() -> None:
    """B061."""
    source = "{% if enable_thinking is defined and not enable_thinking %}plain{% else %}think{% endif %}"
    assert render(source, [USER]) == "think"
    assert render(source, [USER], chat_template_kwargs={"enable_thinking": False}) == "plain"
    assert "secret" not in ChatTemplate(source, {}).variables
    assert render("{{ self }}", [USER], chat_template_kwargs={"secret": "x"}).find("secret") < 0


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_legal_histories_render() -> None:
    """B062."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls is defined %}"
        "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([{"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}], '<assistant>[f {"a": 1}]'),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], "<assistant>x"),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}}], '<assistant>[f {"a": 1}]'),
        ([{"role": "assistant", "content": None, "tool_calls": [call(None)]}], "<assistant>[f {}]"),
        ([{"role": "assistant", "content": None, "tool_calls": [call("")]}], "<assistant>[f {}]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<user>a\nb"),
        ([{"role": "user", "content": ""}], "<user>"),
        ([{"role": "system", "content": "s"}, {"role": "system", "content": "t"}], "<system>s<system>t"),
        ([{"role": "developer", "content": "s"}], "<system>s"),
    ]
    for messages, expected in cases:
        assert render(source, messages, add_generation_prompt=False) == expected


def test_a_template_that_walks_through_parts_gets_parts() -> None:
    source = "{% for m in messages %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endfor %}"
    assert render(source, [USER, {"role": "user", "content": [{"type": "text", "text": "b"}]}]) == "(Hi)(b)"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        [5],
        [{}],
        [{"role": "king", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [5]}],
        [{"role": "assistant", "content": None, "tool_calls": [call("{not json")]}],
        [{"role": "assistant", "content": None, "tool_calls": [{}]}],
        [{"role": "assistant", "content": None, "tool_calls": "x"}],
        [{"role": "assistant", "content": None, "function_call": "x"}],
        [{"role": "assistant", "content": None, "function_call": {"arguments": "{}"}}],
        [{"role": ["user"], "content": "x"}],
    ],
    ids=lambda value: repr(value)[:40],
)
def test_messages_that_are_none(messages: Any) -> None:
    """B049, B062, B080, B097."""
    with pytest.raises(InvalidRequestError) as caught:
        render(SIMPLE, messages)
    assert (caught.value.param or "").startswith("messages")
    assert len(str(caught.value)) < 400


def test_the_final_message_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Well,  "}]
    text = render(SIMPLE, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi\n<assistant>Well,  "
    trimming = SIMPLE.replace("m.content", "m.content | trim")
    assert render(trimming, messages, add_generation_prompt=False, continue_final_message=True).endswith("Well,  ")
    with pytest.raises(InvalidRequestError, match="must not both"):
        render(SIMPLE, messages, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        render("nothing", messages, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_does_not_compile_is_the_operators_fault() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% for %}", {})
