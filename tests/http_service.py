"""A server in this event loop on a real socket, over the real frontend and a scripted core; for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.entrypoints.openai.app import make_app
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.options import ServerOptions
from headrace.entrypoints.openai.server import bind, make_http_server
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.outputs import CoreReady
from headrace.messages.requests import EngineCoreRequest
from headrace.observability.metrics import EngineMetrics
from headrace.testing.engine_config import make_architecture, make_engine_config
from headrace.testing.fake_client import FakeCoreClient

MODEL = "tiny"
MAX_LEN = 128
VOCAB = 300
EOS = 256
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}{{ mood }}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then one special token that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=(EOS,))


@dataclass
class Service:
    """A running server and its parts. ``say`` sets what the core answers to every request."""

    http: httpx.AsyncClient
    core: FakeCoreClient
    llm: AsyncLLM
    context: ServerContext
    tokenizer: Tokenizer
    url: str
    answer: list[int]
    end: Callable[[], Awaitable[None]]

    def say(self, text: str, *, end: bool = True) -> None:
        self.answer[:] = self.tokenizer.encode(text) + ([EOS] if end else [])

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "ab", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **body})


StartService = Callable[..., Any]


async def start_server(auto: bool = True, settings: dict[str, Any] | None = None, **options: Any) -> Service:
    """A running server; keyword arguments are `ServerOptions` and ``auto`` of the core."""
    tokenizer = byte_tokenizer()
    answer: list[int] = []

    def script(request: EngineCoreRequest) -> list[int]:
        return list(answer) or [*tokenizer.encode("hello"), EOS]

    config = make_engine_config(make_architecture(vocab_size=VOCAB), max_model_len=MAX_LEN, **settings or {})
    ready = CoreReady(
        max_model_len=MAX_LEN, vocab_size=VOCAB, num_blocks=64, block_size=4, kv_cache_tokens=256, max_concurrency=2.0
    )
    core = FakeCoreClient(script, ready, auto=auto)
    metrics = EngineMetrics(MODEL, MAX_LEN)
    template = ChatTemplate(TEMPLATE, {}, limit_s=config.limits.template_timeout_s)
    llm = AsyncLLM(core, config, tokenizer, chat_template=template, observer=metrics)
    await llm.start()
    context = ServerContext(llm, MODEL, ServerOptions(port=0, **options), metrics)
    http, url, end = await listen(context)
    return Service(http, core, llm, context, tokenizer, url, answer, end)


async def listen(context: ServerContext) -> tuple[httpx.AsyncClient, str, Callable[[], Awaitable[None]]]:
    """Serve in this event loop; returns a client, the address, and what ends both and the engine."""
    server_options = context.options
    listener = bind(server_options)
    server = make_http_server(make_app(context), server_options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    http = httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False, verify=False)

    async def end() -> None:
        await http.aclose()
        await context.llm.shutdown()
        # Not by its flag and its own shutdown, which both sleep for a tenth of a second.
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
        assert not serving.done(), serving.exception()
        await asyncio.sleep(0)
    return http, url, end


def events_of(text: str) -> tuple[list[dict[str, Any]], bool]:
    """The events of a stream, and whether ``[DONE]`` ended it."""
    lines = [line[6:] for line in text.split("\n\n") if line]
    done = lines[-1:] == ["[DONE]"]
    return [json.loads(line) for line in lines if line != "[DONE]"], done
