"""JSON schemas from requests, checked before anything is compiled: fail closed, with the keyword named.

The grammar library refuses most of what it cannot enforce, by name. Here is what it would pass over: keywords that it
does not know, references that lead nowhere, out of the document or in a circle, schemas that nothing finite satisfies,
switches meant for the library itself, and sheer size. Keywords that demand nothing are taken out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection

MAX_REFERENCES = 500

_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
        "discriminator",
    }
)
_ENFORCED = frozenset(
    {
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    }
)
_FORMATS_WITHOUT_DEMANDS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""What some libraries say of texts that may be any."""
_HARMLESS: dict[str, Any] = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True, "strict": None}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("additionalProperties", "items", "additionalItems")


def clean_schema(schema: Any, param: str, most: LimitsSection) -> Any:
    """Return the schema without what demands nothing.

    Args:
        schema: as parsed from JSON.
        param: the field's name, for errors.
        most: depth, parts and bytes that the operator allows.

    Raises:
        InvalidRequestError: it cannot be enforced as asked.
    """
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"{param} must be a JSON schema", param=param)
    return _Checker(schema, param, most).clean()


def inline_root(schema: dict[str, Any], root: str) -> dict[str, Any]:
    """Return a cleaned schema to stand at ``root`` of another document: its own references lead there."""

    def move(node: Any) -> Any:
        if isinstance(node, list):
            return [move(item) for item in node]
        if not isinstance(node, dict):
            return node
        moved = {key: value if key in ("enum", "const") else move(value) for key, value in node.items()}
        if isinstance(moved.get("$ref"), str):
            moved["$ref"] = root + moved["$ref"][1:]
        return moved

    result: dict[str, Any] = move(schema)
    return result


class _Checker:
    """One schema on its way through the checks."""

    def __init__(self, schema: Any, param: str, most: LimitsSection) -> None:
        self._most = most
        self._root = schema
        self._param = param
        self._num_nodes = 0

    def clean(self) -> Any:
        try:
            size = len(json.dumps(self._root, ensure_ascii=False).encode(errors="replace"))
        except RecursionError:
            raise self._refuse_depth() from None
        except ValueError:
            raise self._refuse("the schema must be plain JSON") from None
        if size > self._most.max_schema_bytes:
            raise self._refuse(f"the schema is larger than {self._most.max_schema_bytes} bytes")
        self._root = self._clean(self._root, 0)
        self._check_references()
        if not self._can_end(self._root, self._ending_references()):
            raise self._refuse("$ref: the schema requires itself, so that no finite value can satisfy it")
        return self._root

    def _refuse(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._param}: {reason}", param=self._param, code="invalid_schema")

    def _refuse_depth(self) -> InvalidRequestError:
        return self._refuse(f"the schema is nested more than {self._most.max_schema_depth} deep")

    def _clean(self, node: Any, depth: int) -> Any:
        self._num_nodes += 1
        if depth > self._most.max_schema_depth:
            raise self._refuse_depth()
        if self._num_nodes > self._most.max_schema_parts:
            raise self._refuse(f"the schema has more than {self._most.max_schema_parts} parts")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise self._refuse("a schema must be an object or a boolean")
        result: dict[str, Any] = {}
        for key, value in node.items():
            if key in _HARMLESS and (value == _HARMLESS[key] or _HARMLESS[key] is None):
                continue
            if key == "format" and isinstance(value, str) and value in _FORMATS_WITHOUT_DEMANDS:
                continue
            if key == "x-guidance" or not (key in _ENFORCED or key in _ANNOTATIONS or key.startswith("x-")):
                raise self._refuse(f"not supported: {_shown(key)}")
            if key.startswith("x-"):
                continue
            result[key] = self._clean_value(key, value, depth)
        return result

    def _clean_value(self, key: str, value: Any, depth: int) -> Any:
        if key in _MAPS:
            if not isinstance(value, dict):
                raise self._refuse(f"{key} must be an object")
            return {name: self._clean(item, depth + 1) for name, item in value.items()}
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise self._refuse(f"{key} must be a list")
            return [self._clean(item, depth + 1) for item in value]
        if key in _SINGLES:
            return self._clean(value, depth + 1)
        return value

    def _check_references(self) -> None:
        for node in _walk(self._root):
            if "$ref" in node:
                self._follow(node)

    def _follow(self, node: dict[str, Any]) -> Any:
        """The schema that a reference means; raises for one that leads nowhere or in a circle."""
        seen = set()
        target: Any = node
        while isinstance(target, dict) and "$ref" in target:
            ref = target["$ref"]
            if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
                raise self._refuse("$ref: only references within the schema (#/…) are supported")
            if ref in seen:
                raise self._refuse("$ref: the reference leads back to itself")
            seen.add(ref)
            target = self._resolve(ref)
        return target

    def _resolve(self, ref: str) -> Any:
        target = self._root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isascii() and part.isdigit() and int(part) < len(target):
                target = target[int(part)]
            else:
                raise self._refuse("$ref: the reference cannot be resolved")
        if not isinstance(target, (dict, bool)):
            raise self._refuse("$ref: the reference does not lead to a schema")
        return target

    def _ending_references(self) -> set[str]:
        """References whose schemas some finite value can satisfy: those known to, until no more come to be known."""
        waiting = {node["$ref"] for node in _walk(self._root) if "$ref" in node}
        if len(waiting) > MAX_REFERENCES:
            raise self._refuse(f"the schema has more than {MAX_REFERENCES} different references")
        known: set[str] = set()
        progress = True
        while progress:
            progress = False
            for ref in list(waiting):
                if self._can_end(self._resolve(ref), known):
                    known.add(ref)
                    waiting.remove(ref)
                    progress = True
        return known

    def _can_end(self, node: Any, known: set[str]) -> bool:
        """Whether a finite value can satisfy ``node``, as far as references go."""
        if not isinstance(node, dict):
            return True
        if "$ref" in node and node["$ref"] not in known:
            return False
        for key in ("anyOf", "oneOf"):
            if node.get(key) and not any(self._can_end(item, known) for item in node[key]):
                return False
        if not all(self._can_end(item, known) for item in node.get("allOf", ())):
            return False
        if "type" in node and not ({"object", "array"} & set(_types(node))):
            return True
        if "type" in node and set(_types(node)) - {"object", "array"}:
            return True
        return self._object_can_end(node, known) and self._array_can_end(node, known)

    def _object_can_end(self, node: dict[str, Any], known: set[str]) -> bool:
        if "type" in node and "object" not in _types(node):
            return True
        properties, required = node.get("properties", {}), node.get("required", ())
        if not isinstance(required, list):
            return True
        return all(self._can_end(properties.get(name), known) for name in required if isinstance(name, str))

    def _array_can_end(self, node: dict[str, Any], known: set[str]) -> bool:
        least = node.get("minItems", 0)
        if ("type" in node and "array" not in _types(node)) or not isinstance(least, int) or least <= 0:
            return True
        first = node.get("prefixItems", [])[:least]
        rest = node.get("items") if least > len(first) else None
        return all(self._can_end(item, known) for item in [*first, rest])


def _walk(node: Any) -> Iterator[dict[str, Any]]:
    """All schemas in a schema, itself first."""
    waiting = [node]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for key in _MAPS:
            waiting += schema.get(key, {}).values()
        for key in _LISTS:
            waiting += schema.get(key, ())
        for key in _SINGLES:
            value = schema.get(key)
            waiting += value if isinstance(value, list) else [value]


def _types(node: dict[str, Any]) -> list[str]:
    types = node["type"]
    return [t for t in (types if isinstance(types, list) else [types]) if isinstance(t, str)]


def _shown(key: str) -> str:
    return key[:40] if key.isprintable() else "a keyword that is not printable"
