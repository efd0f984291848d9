"""Batch files: an answer in the place of every line, whatever is wrong with others, and runs that go on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EngineDeadError
from headrace.entrypoints.batch import BatchRun, Tally
from tests.http_service import MODEL
from tests.simulated_service import SimulatedService, start_simulated


@pytest.fixture
async def service() -> AsyncIterator[SimulatedService]:
    running = await start_simulated()
    yield running
    await running.end()


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    base = {"model": MODEL, "prompt": name, "seed": 1, "max_tokens": 5}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {**base, **body}})


def make(service: SimulatedService, folder: Path, lines: list[str], window: int = 4) -> BatchRun:
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return BatchRun(service.context, folder / "in.jsonl", folder / "out.jsonl", window)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]


async def test_b082_wrong_lines_stay_in_their_places(service: SimulatedService, tmp_path: Path) -> None:
    """B082."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    lines = [
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        line("nope", url="/v1/nope"),
        line("streamed", stream=True),
        '{"custom_id": "broken',
        "",
        line("embeddings", url="/v1/embeddings"),
        line("good"),
        line("good"),
        line("odd", unknown_field=1),
        '{"custom_id": 5}',
        line("other model", model="other"),
    ]
    tally = await make(service, tmp_path, lines).run()
    found = results(tmp_path)
    names = ["chat", "nope", "streamed", None, None, "embeddings", "good", "good", "odd", None, "other model"]
    assert [one["custom_id"] for one in found] == names
    statuses = [200, 400, 400, 400, 400, 400, 200, 400, 400, 400, 404]
    assert [one["response"]["status_code"] for one in found] == statuses
    assert tally == Tally(11, 9)
    for one, status in zip(found, statuses, strict=True):
        assert (one["error"] is None) == (status == 200)
        assert ("error" in one["response"]["body"]) == (status != 200)
    assert found[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert not (tmp_path / "out.jsonl.partial").exists()
    await service.settles()


async def test_answers_are_those_of_the_server(service: SimulatedService, tmp_path: Path) -> None:
    names = [f"prompt {number}" for number in range(30)]
    await make(service, tmp_path, [line(name) for name in names]).run()
    for name, one in zip(names, results(tmp_path), strict=True):
        body = {"model": MODEL, "prompt": name, "seed": 1, "max_tokens": 5}
        reply = (await service.http.post("/v1/completions", json=body)).json()
        assert one["response"]["body"]["choices"] == reply["choices"]


async def test_a_run_that_was_cut_off_goes_on(service: SimulatedService, tmp_path: Path) -> None:
    lines = [line(f"prompt {number}") for number in range(20)]
    batch = make(service, tmp_path, lines, window=2)
    count = 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count == 7:
            raise RuntimeError("power cut")

    batch.on_line = stop
    with pytest.raises(RuntimeError, match="power cut"):
        await batch.run()
    assert not batch.target.exists()
    with batch.partial.open("ab") as kept:
        kept.write(b'{"line": 20, "fai')
    kept_lines = len(batch.partial.read_bytes().splitlines())
    assert kept_lines >= 8
    again = make(service, tmp_path, lines)
    assert await again.run() == Tally(20, 0)
    assert [one["custom_id"] for one in results(tmp_path)] == [f"prompt {number}" for number in range(20)]


async def test_a_partial_output_of_another_input(service: SimulatedService, tmp_path: Path) -> None:
    batch = make(service, tmp_path, [line("a")])
    batch.partial.write_text('{"input": "other"}\n')
    with pytest.raises(ConfigError, match="another input"):
        await batch.run()
    with pytest.raises(ConfigError, match="cannot read"):
        await BatchRun(service.context, tmp_path / "none", tmp_path / "out", 1).run()


async def test_a_dead_engine_writes_no_line(service: SimulatedService, tmp_path: Path) -> None:
    batch = make(service, tmp_path, [line("a"), line("b")])
    await service.llm.shutdown()
    with pytest.raises(EngineDeadError):
        await batch.run()
    assert not batch.target.exists()
    assert len(batch.partial.read_text().splitlines()) == 1


async def test_lines_beyond_the_limit(tmp_path: Path) -> None:
    service = await start_simulated(max_body=2000)
    try:
        await make(service, tmp_path, [line("a"), line("long", prompt="x" * 9000), line("b")]).run()
        assert [one["response"]["status_code"] for one in results(tmp_path)] == [200, 400, 200]
    finally:
        await service.end()
