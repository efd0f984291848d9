"""From what a request asks for to the text of a grammar, in the language of llguidance.

Pure. A constraint may begin only after the reasoning part of an answer: then the grammar starts with that part, as free
text up to the end mark, so that whoever follows the grammar need not know of reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.messages.sampling_params import ReasoningSpan, StructuredOutputParams

_ANY_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \n\r\t]{1,4}/"


def make_source(params: StructuredOutputParams, mark_token_ids: Mapping[str, int]) -> str:
    """Return the grammar.

    Args:
        params: exactly one constraint is set.
        mark_token_ids: tokens that are no text for the library, by name; where one is asked for, it is as a token.

    Raises:
        InvalidRequestError: a structural tag in another shape.
    """
    body = _make_body(params, mark_token_ids)
    if params.reasoning is None:
        return json.dumps({"grammars": body})
    body[0]["name"] = "body"
    return json.dumps({"grammars": [{"lark_grammar": _after(params.reasoning, mark_token_ids)}, *body]})


def _make_body(params: StructuredOutputParams, marks: Mapping[str, int]) -> list[dict[str, Any]]:
    """The grammars of the constraint itself, the first of which is the start."""
    if params.json is not None:
        return [{"json_schema": json.loads(params.json)}]
    if params.json_object:
        return [{"json_schema": {"type": "object"}}]
    if params.regex is not None:
        return [{"lark_grammar": f"start: /{_escape_slashes(params.regex)}/"}]
    if params.choice is not None:
        return [{"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(_quote(text) for text in params.choice)}]
    if params.grammar is not None:
        return [{"lark_grammar": params.grammar}]
    assert params.structural_tag is not None, params
    return [{"lark_grammar": _make_tags(params.structural_tag, marks)}]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape_slashes(regex: str) -> str:
    """Put a backslash before each slash that has none; line breaks are written out."""
    out, escaped = [], False
    for char in regex:
        if char == "\n":
            out.append("n" if escaped else r"\n")
        else:
            out.append(r"\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def _spell(text: str, marks: Mapping[str, int]) -> str:
    """A text as a sequence of quoted pieces and of the tokens that it names."""
    if not text:
        return ""
    if not marks:
        return _quote(text)
    names = sorted(marks, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return " ".join(f"<[{marks[piece]}]>" if piece in marks else _quote(piece) for piece in pieces if piece)


def _until(rule: str, mark: str, marks: Mapping[str, int]) -> str:
    """A rule for any text up to the first ``mark``."""
    lazy = "" if mark in marks else "[lazy]"
    return f"{rule}{lazy}: {_ANY_TEXT} {f'<[{marks[mark]}]>' if mark in marks else _quote(mark)}"


def _after(span: ReasoningSpan, marks: Mapping[str, int]) -> str:
    """A grammar whose start is the reasoning part, then ``body``."""
    lines = [_until("rest", span.end, marks), f"SPACE: {_SPACE}"]
    if span.open:
        lines.append("start: rest SPACE? @body")
    else:
        lines.append(f"start: (SPACE? {_spell(span.start, marks)} rest SPACE?)? @body")
    return "\n".join(lines)


def _make_tags(text: str, marks: Mapping[str, int]) -> str:
    """Free text in which each trigger leads into one of the structures that begin with it."""
    rules, starts = [], []
    for number, (trigger, begin, schema, end) in enumerate(_parse_tags(text)):
        parts = [_spell(begin[len(trigger) :], marks), f"%json {json.dumps(schema)}", _spell(end, marks)]
        rules.append(_until(f"head_{number}", trigger, marks))
        rules.append(" ".join([f"tag_{number}: head_{number}", *filter(None, parts)]))
        starts.append(f"tag_{number}")
    return "\n".join([f"start: ({' | '.join(starts)})* TEXT", f"TEXT: {_ANY_TEXT}", *rules])


def _parse_tags(text: str) -> list[tuple[str, str, Any, str]]:
    """Trigger, begin, schema and end of each structure."""

    def refuse(reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"structural_tag: {reason}", param="structured_outputs.structural_tag")

    try:
        tag = json.loads(text)
        structures, triggers = tag["structures"], tag["triggers"]
        parsed = [(s["begin"], s["schema"], s["end"]) for s in structures]
    except (ValueError, TypeError, KeyError, RecursionError):
        shape = "must be an object with triggers and structures, each with begin, schema and end"
        raise refuse(shape) from None
    if not parsed or not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise refuse("needs triggers that are not empty and at least one structure")
    result = []
    for begin, schema, end in parsed:
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, (dict, bool)):
            raise refuse("begin and end must be text and schema a JSON schema")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise refuse("every begin must start with one of the triggers")
        result.append((trigger, begin, schema, end))
    return result
