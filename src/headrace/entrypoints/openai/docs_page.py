"""``/docs``: the OpenAPI page for people, made here from the same document; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from starlette.responses import HTMLResponse, Response

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .2rem .6rem .2rem 0; vertical-align: top }
summary { cursor: pointer; padding: .3rem 0 }
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


def show_docs(document: dict[str, Any]) -> Response:
    """The page of an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    lines = ["<!doctype html><html lang=en><meta charset=utf-8>"]
    lines.append(f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>")
    lines.append(f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>")
    lines.append("<p>The same for machines: <code>openapi.json</code></p>")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += _show_operation(f"{method.upper()} {path}", operation, schemas)
    lines.append("<h2>Parts of bodies</h2>")
    bodies = {_body_of(operation) for methods in document["paths"].values() for operation in methods.values()}
    for name in schemas.keys() - bodies:
        lines += _show_details(name, schemas[name].get("description", ""), _rows(schemas[name]))
    return HTMLResponse("\n".join(lines), headers=_HEADERS)


def _body_of(operation: dict[str, Any]) -> str | None:
    """Name of the schema that describes an operation's body."""
    body = operation.get("requestBody")
    return None if body is None else _name_of(body["content"]["application/json"]["schema"]["$ref"])


def _name_of(reference: str) -> str:
    return reference.rsplit("/", 1)[1]


def _show_operation(title: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    rows = [(p["name"], _type_of(p["schema"]), f"in the {p['in']}") for p in operation.get("parameters", ())]
    if (body := _body_of(operation)) is not None:
        rows += _rows(schemas[body])
    yield from _show_details(title, operation.get("summary", ""), rows)


def _show_details(title: str, text: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    yield f"<details><summary><b>{escape(title)}</b> {escape(text)}</summary><table>"
    for name, kind, note in rows:
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(note)}"
    yield "</table></details>"


def _rows(schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, type and remark of each field."""
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    return [
        (name, _type_of(one), "required" if name in required else one.get("description", ""))
        for name, one in properties.items()
    ]


def _type_of(schema: dict[str, Any]) -> str:
    """A schema's type in a few words, without null."""
    if "anyOf" in schema:
        kinds = [_type_of(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    if "$ref" in schema:
        return _name_of(schema["$ref"])
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_type_of(schema['items'])}"
    low, above, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    bounds = [f"at least {low:g}" if low is not None else "", f"above {above:g}" if above is not None else ""]
    bounds.append(f"at most {high:g}" if high is not None else "")
    return " ".join([kind, *filter(None, bounds)])
