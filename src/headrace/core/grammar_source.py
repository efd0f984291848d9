"""From what a request asks for to the text of a grammar, in the language of llguidance.

Pure. A constraint may begin only after the reasoning part of an answer: then the grammar starts with that part, as free
text up to the end mark, so that whoever follows the grammar need not know of reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.messages.sampling_params import ReasoningSpan, StructuredOutputParams

_ANY_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \n\r\t]{1,4}/"
_BLANKS = r"[ \n\r\t]{0,4}"


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


def is_json_throughout(params: StructuredOutputParams) -> bool:
    """Whether there is no free text outside the strings of JSON."""
    if params.structural_tag is not None:
        tag = json.loads(params.structural_tag)
        return isinstance(tag, dict) and "otherwise" in tag
    return params.json is not None or params.json_object


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
    """The grammar of a structural tag: structures behind triggers, or an answer that consists of them, or of JSON."""
    try:
        tag = json.loads(text)
        structures = [_Structure.parse(one, marks) for one in tag["structures"]]
        at_start, triggers = tag.get("at_start"), tag.get("triggers")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        shape = "must be an object with triggers and structures, each with begin, schema and end"
        raise _refuse(shape) from None
    if not structures:
        raise _refuse("needs at least one structure")
    if "otherwise" in tag:
        return _make_alternative(structures, at_start or {}, tag["otherwise"], marks)
    if at_start is not None:
        return _make_list(structures, at_start, marks)
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise _refuse("needs triggers that are not empty")
    return _make_triggered(structures, triggers, marks)


def _refuse(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structural_tag: {reason}", param="structured_outputs.structural_tag")


@dataclass(frozen=True, slots=True)
class _Structure:
    """A text that begins a structure, and what follows it in Lark."""

    begin: str
    rest: str

    @staticmethod
    def parse(one: Any, marks: Mapping[str, int]) -> _Structure:
        begin, end = one["begin"], one["end"]
        if not isinstance(begin, str) or not isinstance(end, str):
            raise _refuse("begin and end must be text")
        content = one["parts"] if "parts" in one else [{"schema": one["schema"]}]
        return _Structure(begin, " ".join(filter(None, [_write(content, marks), _spell(end, marks)])))


def _write(parts: Any, marks: Mapping[str, int]) -> str:
    """Parts one after another: texts, schemas, and lists of parts that may be left out."""
    pieces = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(_spell(part, marks))
        elif isinstance(part, list):
            pieces.append(f"({_write(part, marks)})?")
        elif isinstance(part["schema"], (dict, bool)):
            pieces.append(f"%json {json.dumps(part['schema'])}")
        else:
            raise _refuse("schema must be a JSON schema")
    return " ".join(filter(None, pieces))


def _make_triggered(structures: Sequence[_Structure], triggers: Sequence[str], marks: Mapping[str, int]) -> str:
    """Free text in which each trigger leads into one of the structures that begin with it."""
    rules = []
    for number, one in enumerate(structures):
        trigger = next((t for t in triggers if one.begin.startswith(t)), None)
        if trigger is None:
            raise _refuse("every begin must start with one of the triggers")
        rules.append(_until(f"head_{number}", trigger, marks))
        body = " ".join(filter(None, [_spell(one.begin[len(trigger) :], marks), one.rest]))
        rules.append(f"tag_{number}: head_{number} {body}")
    starts = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({starts})* TEXT", f"TEXT: {_ANY_TEXT}", *rules])


def _make_alternative(structures: Sequence[_Structure], form: Any, schema: Any, marks: Mapping[str, int]) -> str:
    """Structures one after another and nothing else, or a JSON value that holds to a schema."""
    try:
        opening, separator, closing = (form.get(name, "") for name in ("opening", "separator", "closing"))
        between = _spell(separator, marks) or "SPACE?"
        rules = [f"tag_{n}: {_spell(one.begin, marks)} {one.rest}" for n, one in enumerate(structures)]
    except (TypeError, AttributeError):
        raise _refuse("at_start must be an object of texts") from None
    if not isinstance(schema, (dict, bool)):
        raise _refuse("otherwise must be a JSON schema")
    any_tag = "(" + " | ".join(f"tag_{number}" for number in range(len(structures))) + ")"
    calls = " ".join(filter(None, [_spell(opening, marks), any_tag, f"({between} {any_tag})*", _spell(closing, marks)]))
    start = f"start: calls | answer\nanswer: %json {json.dumps(schema)}\ncalls: {calls}"
    return "\n".join([start, *([] if separator else [f"SPACE: {_SPACE}"]), *rules])


def _make_list(structures: Sequence[_Structure], form: Any, marks: Mapping[str, int]) -> str:
    """A list of structures, or free text that does not begin as one does; white space may stand before."""
    try:
        lead, opening = form.get("lead", ""), form.get("opening", "")
        separator, closing = form["separator"], form.get("closing", "")
        words = "".join([lead, opening, separator, closing])
    except (TypeError, KeyError, AttributeError):
        raise _refuse("at_start must be an object with a separator") from None
    if not words.isprintable() or not all((opening or one.begin)[:1].strip() for one in structures):
        raise _refuse("structures at the start must begin with a character that can be seen")
    rules, firsts, others = [], [], []
    # A mark is a token of its own and no text; any other lead belongs to the text of the first structure.
    before = f"(<[{marks[lead]}]>)? " if lead in marks else ""
    optional = f"({_literal(lead)})?{_BLANKS}" if lead and lead not in marks else ""
    for number, one in enumerate(structures):
        rules.append(f"FIRST_{number}: /{_BLANKS}{optional}{_literal(opening + one.begin)}/")
        rules.append(f"NEXT_{number}: {_quote(separator + one.begin)}")
        firsts.append(f"FIRST_{number} rest_{number}")
        others.append(f"NEXT_{number} rest_{number}")
        rules.append(f"rest_{number}: {one.rest}" if one.rest else f'rest_{number}: ""')
    begins = {_literal((opening or one.begin)[0]) for one in structures}
    begins |= {_literal(lead)} if optional else set()
    end = f" {_quote(closing)}" if closing else ""
    rules.append(f"calls: ({' | '.join(firsts)}) ({' | '.join(others)})*{end}")
    rules.append(f"TEXT: {_ANY_TEXT} & ~/[ \\t\\r\\n]*({'|'.join(sorted(begins))})(.|\\n)*/")
    return "\n".join([f"start: {before}calls | TEXT", *rules])


def _literal(text: str) -> str:
    """A text as part of a regular expression between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
