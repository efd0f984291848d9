"""Servers for the tests of this room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

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
