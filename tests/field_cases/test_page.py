"""The page of field cases is true: every case is on it, and the tests that it names name the case."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (B\d{3}) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    return dict(ROW.findall((ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8")))


def test_every_case_is_on_the_page(shared_dir: Path) -> None:
    listed = re.findall(r"^#### (B\d{3})$", (shared_dir / "cases" / "field-cases.md").read_text(), re.MULTILINE)
    assert sorted(rows()) == sorted(listed)


def test_the_named_tests_name_the_case() -> None:
    for case, cell in rows().items():
        files = re.findall(r"`([^`]+)`", cell)
        assert files or cell.startswith("not yet: "), case
        for name in files:
            text = (ROOT / "tests" / name).read_text(encoding="utf-8")
            assert re.search(rf"\b{case}\b|_{case.lower()}_", text), (case, name)
