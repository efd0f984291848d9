"""The load generator against the real HTTP server over a scripted core, and against servers that misbehave."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, HeadraceError
from headrace.entrypoints.bench import report, serve
from headrace.entrypoints.bench.client import BenchClient, RequestError, Target
from headrace.entrypoints.bench.load import run_closed_loop, run_open_loop
from headrace.entrypoints.bench.statistics import RequestRecord
from tests.http_service import Service, start_server


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Service]:
    service = await start_server(**options)
    try:
        yield service
    finally:
        await service.end()


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_streams_are_timed_and_counted(endpoint: str) -> None:
    async with running(api_key=("k",)) as service:
        service.say("seven!!")
        args = parse("--url", service.url, "--endpoint", endpoint, "--num-prompts", "1", "--input-len", "4")
        client = BenchClient(Target.from_url(service.url + "/v1", "k"), 10.0)
        assert await serve.find_model(client, service.url) == "tiny"
        (body,) = serve.make_bodies(args, "tiny")
        record = RequestRecord(due=0.0)
        await client.stream(serve.PATHS[endpoint], body, record)
        assert record.error is None, record.message
        assert record.num_output_tokens in (7, 8) and record.num_prompt_tokens > 4
        assert 0 < record.sent <= record.token_times[0] <= record.token_times[-1] <= record.end
        refused = RequestRecord(due=0.0)
        await BenchClient(Target.from_url(service.url), 10.0).stream(serve.PATHS[endpoint], body, refused)
        assert refused.error == "HTTP 401" and "API key" in refused.message


async def test_both_loops_answer_every_request_in_order() -> None:
    async with running() as service:
        client = BenchClient(Target.from_url(service.url), 10.0)
        bodies = serve.make_bodies(parse("--num-prompts", "20", "--input-len", "3", "--spread", "0.5"), "tiny")
        done: list[RequestRecord] = []
        closed = await run_closed_loop(client, "/completions", bodies, 4, done.append)
        opened = await run_open_loop(client, "/completions", bodies, [0.001 * i for i in range(20)], done.append)
        assert len(closed) == len(opened) == 20 and len(done) == 40
        assert all(record.error is None and record.num_output_tokens for record in done)
        assert [r.due - opened[0].due for r in opened] == pytest.approx([0.001 * i for i in range(20)])
        assert all(record.sent >= record.due for record in opened)
        assert [r.num_prompt_tokens for r in closed] == [r.num_prompt_tokens for r in opened]


@asynccontextmanager
async def scripted(answer: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A server that reads a request's head and then does what ``answer`` says."""

    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(ended.wait(), 5.0)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(
    ("data", "kind", "num_tokens"),
    [
        (HEAD + EVENT * 3 + b"data: [DONE]\n\n", None, 3),
        (HEAD + EVENT.replace(b"\n", b"\r\n") * 2 + b": ping\r\n\r\ndata: [DONE]\r\n\r\n", None, 2),
        (HEAD + EVENT * 2, "incomplete", 2),
        (HEAD + EVENT + b'data: {"error": {"message": "engine died"}}\n\n', "error event", 1),
        (HEAD + b"data: {oops\n\n", "bad event", 0),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503", 0),
        (b"SSH-2.0\r\n\r\n", "not HTTP", 0),
        (b"", "connection lost", 0),
    ],
)
async def test_failures_are_counted_by_kind(data: bytes, kind: str | None, num_tokens: int) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        # Cuts at odd places: events come in any pieces.
        for start in range(0, len(data), 7):
            writer.write(data[start : start + 7])
            await writer.drain()
            await asyncio.sleep(0)

    async with scripted(answer) as url:
        record = RequestRecord(due=0.0)
        await BenchClient(Target.from_url(url), 10.0).stream("/completions", b"{}", record)
    assert (record.error, len(record.token_times)) == (kind, num_tokens), record.message


async def test_a_silent_server_times_out_and_an_absent_one_is_named() -> None:
    timed_out = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await timed_out.wait()

    async with scripted(answer) as url:
        record = RequestRecord(due=0.0)
        await BenchClient(Target.from_url(url), 0.05).stream("/completions", b"{}", record)
        timed_out.set()
        assert record.error == "timeout"
    client = BenchClient(Target.from_url("http://127.0.0.1:9"), 1.0)
    with pytest.raises(RequestError, match=r"refused|failed"):
        await client.get("/models")
    with pytest.raises(HeadraceError, match="is the server running"):
        await serve.find_model(client, "http://127.0.0.1:9")


def test_urls() -> None:
    assert Target.from_url("http://h:1/v1/") == Target.from_url("http://h:1") == Target("h", 1, False, "/v1")
    assert Target.from_url("https://h/base") == Target("h", 443, True, "/base/v1")
    with pytest.raises(ConfigError, match="http://host:port"):
        Target.from_url("localhost:8000")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--burst", "2"], "--request-rate"),
        (["--request-rate", "2", "--concurrency", "2"], "exclude"),
        (["--endpoint", "chat", "--prompt-format", "tokens"], "completions"),
        (["--goodput", "x:1"], "goodput"),
    ],
)
def test_flags_that_contradict_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve.run(parse(*words))


async def test_a_whole_run_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    async with running() as service:
        words = [
            "--url",
            service.url,
            "--num-prompts",
            "6",
            "--request-rate",
            "500",
            "--burst",
            "3",
            "--input-len",
            "4",
        ]
        files = ["--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png")]
        args = parse(*words, "--goodput", "ttft:60000", "--prompt-format", "text", "--prefix-len", "8", *files)
        # It runs an event loop of its own, as the command does.
        status = await asyncio.get_running_loop().run_in_executor(None, serve.run, args)
    assert status == 0
    shown = capsys.readouterr().out
    assert "6 requests completed" in shown and "100.0% of all" in shown
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["benchmark"] == "serve" and len(data["requests"]) == 6 and data["results"]["num_completed"] == 6
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_plot_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"headrace\[bench\]"):
        report.check_plots()
