"""Thousands of odd requests: no 5xx, no hang, nothing left behind, and a stream beside them never changes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.odd_requests import requests
from tests.simulated_service import SimulatedService, start_simulated

AT_ONCE = 10
TIMEOUT_S = 10.0
SHORT, LONG = 2_000, 20_000
Odd = tuple[str, bytes, bool]


class Field:
    """A server that lives as long as the test, in a loop that hypothesis can enter again and again."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.num_requests = 0
        self.service: SimulatedService = self._runner.run(start_simulated())
        self._canary = self._runner.run(self.service.canary())

    def close(self) -> None:
        self._runner.run(self.service.end())
        self._runner.close()

    def play(self, odd: list[Odd]) -> None:
        self._runner.run(self._play(odd))

    async def _play(self, odd: list[Odd]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            canary, *_ = await asyncio.gather(self.service.canary(), *(self._send(*one) for one in odd))
        assert canary == self._canary
        self.num_requests += len(odd)

    async def _send(self, path: str, body: bytes, leaves: bool) -> None:
        headers = {"Content-Type": "application/json"}
        async with self.service.http.stream("POST", path, content=body, headers=headers) as reply:
            assert reply.status_code < 500, (path, body, await reply.aread())
            if leaves:
                return
            text = (await reply.aread()).decode()
        if reply.headers["content-type"].startswith("text/event-stream"):
            _check_stream(path, text)
        else:
            answer = json.loads(text, parse_constant=_refuse)
            if reply.status_code != 200:
                assert len(text) < 2_000
                assert answer["error"]["message"], (path, body)

    def settle(self) -> None:
        self._runner.run(self.service.settles())


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


def play_many(field: Field, count: int) -> None:
    @settings(
        max_examples=math.ceil(count / AT_ONCE),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
    )
    @given(st.lists(requests(), min_size=AT_ONCE, max_size=AT_ONCE))
    def play(odd: list[Odd]) -> None:
        field.play(odd)

    play()
    assert field.num_requests >= count
    field.settle()


@pytest.mark.slow
def test_odd_requests(field: Field) -> None:
    play_many(field, SHORT)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_odd_requests(field: Field) -> None:
    play_many(field, LONG)
