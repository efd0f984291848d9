"""A server in this event loop over a real core: real scheduling and blocks, pseudo tokens, faults on demand.

The tokenizer has a token per byte, so that answers are full of broken UTF-8. What a request must answer is known from
itself alone, so any harm that one does to another shows.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.core.inproc_client import InprocClient
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.options import ServerOptions
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.fan_out import RequestGroup
from headrace.frontend.input_processor import Prompt, PromptTokens
from headrace.frontend.stream import OutputStream
from headrace.observability.metrics import EngineMetrics
from headrace.testing.engine_config import make_architecture, make_engine_config
from tests.http_service import EOS, MODEL, TEMPLATE, byte_tokenizer, listen

EXECUTOR = "headrace.testing.simulated_executor:make_executor"
VOCAB = 300
CANARY: dict[str, Any] = {"model": MODEL, "prompt": "canary", "seed": 7, "max_tokens": 40, "ignore_eos": True}
CORE_PHASES = ("forward", "sample", "logits")


class PoisonError(RuntimeError):
    """Raised where a test wants it; its text must never reach a client."""

    def __init__(self) -> None:
        super().__init__("SECRET cause at /etc/secret")


class _PoisonedDetokenizer:
    def decode(self, token_ids: Sequence[int]) -> str:
        raise PoisonError

    def flush(self) -> str:
        raise PoisonError


class FaultyLLM(AsyncLLM):
    """Makes chosen requests fail; ``faults`` maps a client's id (with its prefix) to the phase and how often."""

    faults: dict[str, dict[str, Any]] = {}

    async def add_requests(
        self, prompts: Sequence[Any], sampling_params: Any = None, request_id: str | None = None, **options: Any
    ) -> list[OutputStream]:
        fault = self.faults.get(request_id or "")
        if fault is not None and fault["phase"] in CORE_PHASES:
            options["fault"] = fault
        return await super().add_requests(prompts, sampling_params, request_id, **options)

    def _register(self, group: RequestGroup) -> OutputStream:
        fault = self.faults.get(group.external_id)
        if fault is not None and fault["phase"] == "detokenise":
            for answer in group.answers:
                answer._detokenizer = _PoisonedDetokenizer()  # type: ignore[assignment]
        return super()._register(group)

    async def tokenize(self, prompt: Prompt | PromptTokens, add_special_tokens: bool = True) -> PromptTokens:
        if prompt == "POISON":
            raise PoisonError
        return await super().tokenize(prompt, add_special_tokens)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> PromptTokens:
        if any(message.get("content") == "POISON" for message in messages):
            raise PoisonError
        return await super().tokenize_chat(messages, **options)


@dataclass
class SimulatedService:
    """A running server and its parts."""

    http: httpx.AsyncClient
    llm: FaultyLLM
    context: ServerContext
    url: str
    end: Callable[[], Awaitable[None]]

    async def canary(self) -> tuple[str, list[int]]:
        """Text and ids of a stream that nothing may change."""
        text, ids = "", []
        body = {**CANARY, "stream": True, "return_token_ids": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["text"]
                    ids += choice["token_ids"]
        return text, ids

    async def gauge(self, name: str) -> float:
        """A value of ``/metrics``, summed over its labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    async def settles(self) -> None:
        """Everything has ended, here and in the core, and no block is in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        async with asyncio.timeout(10):
            while self.llm.num_requests or any([await self.gauge(name) for name in names]):
                await asyncio.sleep(0.01)
        self.llm._processor.check_invariants()
        assert not self.llm._streams
        assert (await self.http.get("/health")).status_code == 200
        assert self.context.num_in_flight == 0


async def start_simulated(
    settings: dict[str, Any] | None = None, step_s: float = 0.0, **options: Any
) -> SimulatedService:
    """A running server; ``settings`` are the engine's, other arguments the server's."""
    architecture = make_architecture(vocab_size=VOCAB, eos_token_ids=(EOS,), max_position=8192)
    folder = tempfile.TemporaryDirectory()
    tokenizer = byte_tokenizer()
    # The core reads it for its grammars.
    tokenizer.backend.save(f"{folder.name}/tokenizer.json")
    config = make_engine_config(
        architecture, **{"pipeline_depth": 2, "num_kv_blocks": 200, "tokenizer": folder.name, **(settings or {})}
    )
    client = InprocClient(config, EXECUTOR, {"step_s": step_s})
    metrics = EngineMetrics(MODEL, config.max_model_len)
    llm = FaultyLLM(client, config, tokenizer, chat_template=ChatTemplate(TEMPLATE, {}), observer=metrics)
    llm.faults = {}
    await llm.start()
    context = ServerContext(llm, MODEL, ServerOptions(port=0, **options), metrics)
    http, url, stop = await listen(context)

    async def end() -> None:
        await stop()
        folder.cleanup()

    return SimulatedService(http, llm, context, url, end)


@contextmanager
def threaded_service(settings: dict[str, Any] | None = None) -> Iterator[SimulatedService]:
    """A server in a thread of its own, for clients that know no event loop; nothing may be left at its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = asyncio.run_coroutine_threadsafe(start_simulated(settings), loop).result(30)
    try:
        yield running
        asyncio.run_coroutine_threadsafe(running.settles(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(running.end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
