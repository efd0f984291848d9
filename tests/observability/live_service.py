"""A server on a real socket over a real core whose executor is simulated; for tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.core.make_client import make_client
from headrace.entrypoints.openai.app import make_app
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.options import ServerOptions
from headrace.entrypoints.openai.server import bind, make_http_server
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.chat import ChatTemplate
from headrace.observability.metrics import EngineMetrics
from headrace.testing.engine_config import make_architecture, make_engine_config
from tests.http_service import MODEL, TEMPLATE, byte_tokenizer

EXECUTOR = "headrace.testing.simulated_executor:make_executor"


@dataclass
class Live:
    """A running server. ``end`` stops everything."""

    http: httpx.AsyncClient
    url: str
    llm: AsyncLLM
    metrics: EngineMetrics
    context: ServerContext
    listener: socket.socket
    end: Callable[[], Awaitable[None]]

    async def complete(self, name: str, *, timeout: float = 30.0, **body: Any) -> httpx.Response:
        fields = {"model": MODEL, "prompt": "ab", "ignore_eos": True, **body}
        headers = {"X-Request-Id": name}
        return await self.http.post(
            "/v1/completions", json=fields, headers=headers, timeout=httpx.Timeout(30.0, read=timeout)
        )

    async def explain(self, name: str) -> dict[str, Any]:
        reply = await self.http.get(f"/v1/requests/{name}/explain")
        assert reply.status_code == 200, reply.text
        return reply.json()


async def start_live(*, step_s: float = 0.002, options: dict[str, Any] | None = None, **settings: Any) -> Live:
    """A server whose steps take ``step_s``; ``options`` are the server's, the rest the engine's."""
    defaults = {"max_model_len": 256, "num_kv_blocks": 257, "pipeline_depth": 2}
    config = make_engine_config(make_architecture(vocab_size=256, max_position=16384), **defaults | settings)
    client = make_client(config, "inproc", executor=EXECUTOR, options={"step_s": step_s})
    metrics = EngineMetrics(MODEL, config.max_model_len)
    template = ChatTemplate(TEMPLATE, {})
    llm = AsyncLLM(client, config, byte_tokenizer(), chat_template=template, observer=metrics)
    ready = await llm.start()
    metrics.attach({"block_size": ready.block_size, "num_gpu_blocks": ready.num_blocks}, lambda: llm.progress_age_s)
    server_options = ServerOptions(port=0, **options or {})
    context = ServerContext(llm, MODEL, server_options, metrics)
    listener = bind(server_options)
    server = make_http_server(make_app(context), server_options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    http = httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False)

    async def end() -> None:
        await http.aclose()
        await llm.shutdown()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        while server.server_state.connections:
            await asyncio.sleep(0)
        listener.close()

    while not server.started:
        await asyncio.sleep(0)
    return Live(http, url, llm, metrics, context, listener, end)
