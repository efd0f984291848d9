"""Command-line flags made from the configuration's fields: one definition gives flag, type, default and help.

A flag that was not given leaves its setting open, so that `config.resolve` can tell a user's wish from a default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace.config.resolve import SECTIONS, flag_name, type_of
from headrace.config.units import parse_size

_OPEN = argparse.SUPPRESS


def add_flags(parser: argparse.ArgumentParser, skip: Iterable[str] = ("model",)) -> None:
    """Add one group of flags per section; ``skip`` names fields that the command takes otherwise."""
    skipped = set(skip)
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section)
        hints = get_type_hints(kind)
        for field in fields(kind):
            if field.name not in skipped:
                _add_flag(group, field, type_of(hints, field)[0])


def _add_flag(group: argparse._ArgumentGroup, field: Field[Any], base: Any) -> None:
    help_text = field.metadata["help"].replace("%", "%%")
    default = field.default
    shown = "" if default in (None, "", 0) or isinstance(default, bool) else f" (default: {default})"
    options: dict[str, Any] = {"dest": field.name, "default": _OPEN, "help": help_text + shown}
    if base is bool:
        group.add_argument(flag_name(field), action=argparse.BooleanOptionalAction, **options)
        return
    if get_origin(base) is Literal:
        options["choices"] = list(get_args(base))
    elif field.metadata.get("unit") == "bytes":
        options |= {"type": _size, "metavar": "SIZE"}
    else:
        options |= {"type": base, "metavar": {int: "N", float: "X"}.get(base, "TEXT")}
    group.add_argument(flag_name(field), **options)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def settings_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by field name, for `config.resolve.resolve`."""
    given = vars(args)
    return {f.name: given[f.name] for kind in SECTIONS.values() for f in fields(kind) if f.name in given}
