"""From what a request asks for to the text of a grammar, in the language of llguidance.

Pure. A constraint may begin only after the reasoning part of an answer: then the grammar starts with that part, as free
text up to the end mark, so that whoever follows the grammar need not know of reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.messages.sampling_params import ReasoningSpan, StructuredOutputParams

_ANY_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \n\r\t]{1,4}/"


def make_source(params: StructuredOutputParams, special_token_ids: Mapping[str, int]) -> str:
    """Return the grammar.

    Args:
        params: exactly one constraint is set.
        special_token_ids: special tokens by name; marks that are among them are tokens, all others are text.

    Raises:
        InvalidRequestError: a structural tag in another shape.
    """
    body = _make_body(params)
    if params.reasoning is None:
        return json.dumps({"grammars": body})
    body[0]["name"] = "body"
    return json.dumps({"grammars": [{"lark_grammar": _after(params.reasoning, special_token_ids)}, *body]})


def _make_body(params: StructuredOutputParams) -> list[dict[str, Any]]:
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
    return [{"lark_grammar": _make_tags(params.structural_tag)}]


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


def _after(span: ReasoningSpan, special_token_ids: Mapping[str, int]) -> str:
    """A grammar whose start is the reasoning part, then ``body``."""
    end_id = special_token_ids.get(span.end)
    if end_id is None:
        rest = f"rest[lazy]: {_ANY_TEXT} {_quote(span.end)}"
    else:
        rest = f"rest: {_ANY_TEXT} <[{end_id}]>"
    lines = [rest, f"SPACE: {_SPACE}"]
    if span.open:
        lines.append("start: rest SPACE? @body")
    else:
        start_id = special_token_ids.get(span.start)
        mark = _quote(span.start) if start_id is None else f"<[{start_id}]>"
        lines.append(f"start: (SPACE? {mark} rest SPACE?)? @body")
    return "\n".join(lines)


def _make_tags(text: str) -> str:
    """Free text in which each trigger leads into one of the structures that begin with it."""
    begins, rules, starts = _parse_tags(text), [], []
    for number, (trigger, begin, schema, end) in enumerate(begins):
        tail = f" {_quote(end)}" if end else ""
        head = f" {_quote(begin[len(trigger) :])}" if len(begin) > len(trigger) else ""
        rules.append(f"head_{number}[lazy]: {_ANY_TEXT} {_quote(trigger)}")
        rules.append(f"tag_{number}: head_{number}{head} %json {json.dumps(schema)}{tail}")
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
