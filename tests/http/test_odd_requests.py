"""Thousands of odd requests: no 5xx, no hang, nothing left behind, and a stream beside them never changes."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.entrypoints.batch import BatchRun
from tests.http.odd_wires import Odd, batch_lines, wires
from tests.http.raw_client import RawReply, exchange
from tests.simulated_service import SimulatedService, start_simulated

AT_ONCE = 10
TIMEOUT_S = 60.0
SHORT, LONG = 2_000, 20_000
MAX_REFUSAL_BYTES = 2_000


class Field:
    """A server that lives as long as the test, in a loop that hypothesis can enter again and again."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.num_requests = 0
        self.service: SimulatedService = self._runner.run(start_simulated())
        # The loop stands still between two examples, so that an idle connection may be closed just as it is used again.
        self._runner.run(self.service.http.aclose())
        limits = httpx.Limits(max_keepalive_connections=0)
        self.service.http = httpx.AsyncClient(base_url=self.service.url, limits=limits, timeout=60.0, trust_env=False)
        self._canary = self._runner.run(self.service.canary())

    def close(self) -> None:
        self._runner.run(self.service.http.aclose())
        self._runner.run(self.service.end())
        self._runner.close()

    def play(self, odd: list[Odd]) -> None:
        self._runner.run(self._beside_canary(*(self._send(one) for one in odd)))
        self.num_requests += len(odd)

    def play_batch(self, lines: list[bytes]) -> None:
        self._runner.run(self._beside_canary(self._batch(lines)))
        self.num_requests += len(lines)

    async def _beside_canary(self, *work: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            canary, *_ = await asyncio.gather(self.service.canary(), *work)
        assert canary == self._canary

    async def _send(self, odd: Odd) -> None:
        reply = await exchange(self.service.url, odd.pieces, leaves=odd.leaves, cut=odd.cut)
        assert reply.status < 500, (odd, reply)
        if odd.leaves or (odd.wild and not reply.is_whole):
            return
        assert reply.is_whole, (odd, reply)
        if reply.kind == "text/event-stream":
            _check_stream(odd.path, reply.body.decode())
        elif reply.kind == "application/json":
            _check_answer(reply)
        else:
            assert odd.wild, (odd, reply)

    async def _batch(self, lines: list[bytes]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "in", Path(folder) / "out"
            source.write_bytes(b"".join(line + b"\n" for line in lines))
            await BatchRun(self.service.context, source, target, window=4).run()
            results = target.read_bytes().splitlines()
        assert len(results) == len(lines)
        for result in results:
            answer = json.loads(result, parse_constant=_refuse)
            assert answer["response"]["status_code"] < 500, answer
            assert (answer["error"] is None) == (answer["response"]["status_code"] == 200)

    def settle(self) -> None:
        self._runner.run(self.service.settles())


def _check_answer(reply: RawReply) -> None:
    answer = json.loads(reply.body, parse_constant=_refuse)
    if reply.status >= 300:
        assert len(reply.body) < MAX_REFUSAL_BYTES
        assert answer["error"]["message"]


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def _check_stream(path: str, text: str) -> None:
    """It ends in its proper way or with one error that is the client's own."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line, parse_constant=_refuse) for line in data if line != "[DONE]"]
    errors = [event for event in events if event.get("error")]
    if errors:
        assert errors == events[-1:]
        assert errors[0]["error"]["type"] == "invalid_request_error", errors
    elif path == "/v1/responses":
        assert events[-1]["type"] in ("response.completed", "response.incomplete", "error"), events[-1]
        assert events[-1].get("code") not in ("internal_error", "request_failed")
    else:
        assert data[-1] == "[DONE]", text


@pytest.fixture
def field() -> Iterator[Field]:
    made = Field()
    yield made
    made.close()


Play = Callable[..., None]


def play_many(field: Field, count: int, play: Play, strategy: st.SearchStrategy[Any]) -> None:
    @settings(
        max_examples=math.ceil(count / AT_ONCE),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
    )
    @given(st.lists(strategy, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(odd: list[Any]) -> None:
        play(odd)

    run()
    assert field.num_requests >= count
    field.settle()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_odd_requests(field: Field) -> None:
    play_many(field, SHORT, field.play, wires())


@pytest.mark.slow
def test_odd_batches(field: Field) -> None:
    play_many(field, SHORT // 10, field.play_batch, batch_lines())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_odd_requests(field: Field) -> None:
    play_many(field, LONG, field.play, wires())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_odd_batches(field: Field) -> None:
    play_many(field, LONG // 10, field.play_batch, batch_lines())
