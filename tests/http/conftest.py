"""Servers for the tests of this room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.server_process import ServerProcess
from tests.http_service import Service, start_server

StartService = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start_service() -> AsyncIterator[StartService]:
    """Starts servers and ends them after the test."""
    started: list[Service] = []

    async def start(**options: Any) -> Service:
        started.append(await start_server(**options))
        return started[-1]

    yield start
    for service in started:
        await service.end()


@pytest.fixture
async def service(start_service: StartService) -> Service:
    """A server whose core steps by itself."""
    return await start_service()


SMALL = ("--max-model-len", "256", "--kv-cache-memory", "64MiB", "--max-num-seqs", "8", "--served-model-name", "smol")


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    """The real server with the real model and a small context, shared by all tests of a run."""
    with ServerProcess(smollm2_gguf, *SMALL) as process:
        process.wait_ready()
        yield process
        assert process.stop() == 0
