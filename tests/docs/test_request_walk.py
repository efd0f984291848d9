"""Each ``file: symbol`` that the walk through a request names exists, so that the page cannot go stale."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALK = (ROOT / "docs" / "request.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", WALK)))


def find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The definition or assignment of ``name`` among statements."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def test_the_walk_stays_short() -> None:
    assert 20 <= len({file for file, _ in NAMED}) <= 60


@pytest.mark.parametrize(("file", "symbol"), NAMED)
def test_the_symbol_exists(file: str, symbol: str) -> None:
    body = ast.parse((ROOT / "src" / "headrace" / file).read_text()).body
    for name in symbol.split("."):
        node = find(body, name)
        assert node is not None, f"{file} has no {symbol}"
        body = getattr(node, "body", [])
