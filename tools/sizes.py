"""Print how big each room is, and which files and functions have outgrown one idea. A report, not a gate."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
_SOURCES = (("src/headrace", "*.py"), ("csrc", "*.cpp"), ("csrc", "*.h"), ("tests", "*.py"), ("tools", "*.py"))


def source_files() -> Iterator[Path]:
    """Every file that is counted."""
    for folder, pattern in _SOURCES:
        yield from sorted((ROOT / folder).rglob(pattern))


def room_of(path: Path) -> str:
    """The room of a file: two levels for the package, one for the rest."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return parts[0]
    rest = parts[2:-1]
    return "/".join(rest[:2] if rest and rest[0] in ("control", "device", "entrypoints") else rest[:1]) or "(root)"


def long_functions(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Functions with too many lines, as (lines, place)."""
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def main() -> None:
    """Write the report to standard output."""
    rooms: Counter[str] = Counter()
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in source_files():
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        rooms[room_of(path)] += lines
        if lines > MAX_FILE_LINES:
            files.append((lines, str(path.relative_to(ROOT))))
        if path.suffix == ".py":
            functions.extend(long_functions(path, text))
    print("lines per room")
    for room, lines in sorted(rooms.items()):
        print(f"  {lines:6d}  {room}")
    print(f"  {sum(rooms.values()):6d}  in all")
    for title, entries in (
        (f"files over {MAX_FILE_LINES} lines", files),
        (f"functions over {MAX_FUNCTION_LINES} lines", functions),
    ):
        print(f"{title}: {len(entries) or 'none'}")
        for lines, place in sorted(entries, reverse=True):
            print(f"  {lines:6d}  {place}")


if __name__ == "__main__":
    main()
