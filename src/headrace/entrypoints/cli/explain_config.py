"""``headrace explain-config``.

examples:
  headrace explain-config
  headrace explain-config model.gguf --dtype float32 --max-model-len 2048
  headrace explain-config --json

Takes the same flags as serve and starts nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from headrace.config.flags import add_flags, settings_from_args
from headrace.config.resolve import SECTIONS
from headrace.config.sections import EngineConfig
from headrace.config.units import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="the model (default: smollm2-135m)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_flags(parser)


def explained(config: EngineConfig) -> list[tuple[str, Any, str]]:
    """``(section.field, value, reason)`` of every setting."""
    rows: list[tuple[str, Any, str]] = []
    for section, kind in SECTIONS.items():
        for field in fields(kind):
            path = f"{section}.{field.name}"
            rows.append((path, getattr(getattr(config, section), field.name), config.reasons.get(path, "default")))
    return rows


def table(rows: list[tuple[str, Any, str]]) -> str:
    """The rows in columns for people."""
    sizes = {
        f"{section}.{f.name}" for section, kind in SECTIONS.items() for f in fields(kind) if f.metadata.get("unit")
    }
    shown = [(path, format_size(value) if path in sizes and value else _text(value), why) for path, value, why in rows]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    return "\n".join(f"{path:{widths[0]}}  {value:{widths[1]}}  {why}" for path, value, why in shown)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def run(args: argparse.Namespace) -> int:
    """Print the resolved settings."""
    from headrace.entrypoints.engine_config import load_engine_config

    rows = explained(load_engine_config(settings_from_args(args)))
    if args.json:
        print(json.dumps({path: {"value": value, "reason": why} for path, value, why in rows}, indent=2))
    else:
        print(table(rows))
    return 0
