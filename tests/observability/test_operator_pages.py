"""The operators' pages name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.core.kv_publisher import KVEventsConfig
from headrace.core.replay import Replay
from headrace.entrypoints.openai.app import ROUTES
from tests.observability.test_replay import record_mixed

PAGES = Path(__file__).resolve().parents[2] / "docs" / "operators"


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_links_and_routes_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    known = {path.replace("{request_id:path}", "{id}") for _, path, _ in ROUTES}
    for path in re.findall(r"`(?:GET|POST) (/[^`?]*)", text):
        assert path in known, path


def test_every_field_of_kv_events_is_explained() -> None:
    text = (PAGES / "kv-events.md").read_text()
    for name in KVEventsConfig.__struct_fields__:
        assert f"`{name}`" in text, name


def test_every_kind_of_a_recording_is_explained(tmp_path: Path) -> None:
    record_mixed(tmp_path / "a.rec", 2)
    kinds = Replay(str(tmp_path / "a.rec"))._calls.keys()
    text = (PAGES / "recording.md").read_text()
    assert all(f"| `{kind}` |" in text for kind in kinds), kinds
