"""An engine for one command: started, handed out, and ended on every way out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM


@asynccontextmanager
async def local_engine(settings: Mapping[str, Any]) -> AsyncIterator[AsyncLLM]:
    """An engine whose core runs in a process of its own.

    Args:
        settings: by field name, as for `load_engine_config`.
    """
    from headrace.core.make_client import make_client
    from headrace.entrypoints.async_engine import make_async_llm
    from headrace.entrypoints.engine_config import load_engine_config

    config = load_engine_config({"log_level": "warning", **settings})
    client = make_client(config, "process")
    try:
        llm = make_async_llm(config, client)
        try:
            await llm.start()
            yield llm
        finally:
            await llm.shutdown()
    finally:
        await client.shutdown()
