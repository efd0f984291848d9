"""Constraints over a real core: the same texts with several answers, stop strings, prefix hits, preemption, streams."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.http_service import MODEL, events_of
from tests.simulated_service import SimulatedService, start_simulated

WORD = "[a-c]{3}-([0-9]{4}-){6}[x-z]{2}"
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "a prompt of several blocks, so that a second request finds them " * 2,
    "structured_outputs": {"regex": WORD},
    "max_tokens": 100,
    "n": 3,
    "seed": 3,
}
EASY: dict[str, Any] = {"pipeline_depth": 1, "enable_prefix_caching": False, "max_model_len": 256}


async def ask(service: SimulatedService, **more: Any) -> tuple[list[str], dict[str, Any]]:
    reply = await service.http.post("/v1/completions", json={**BODY, **more}, timeout=30)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return [choice["text"] for choice in answer["choices"]], answer


async def streamed(service: SimulatedService, **more: Any) -> list[str]:
    reply = await service.http.post("/v1/completions", json={**BODY, **more, "stream": True}, timeout=30)
    events, done = events_of(reply.text)
    assert done
    texts = [""] * BODY["n"]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize(
    "settings", [{"num_kv_blocks": 2000}, {"num_kv_blocks": 2000, "pipeline_depth": 3}, {"num_kv_blocks": 70}]
)
async def test_the_same_texts_whatever_happens_beside(settings: dict[str, Any]) -> None:
    calm = await start_simulated(EASY)
    busy = await start_simulated({"max_model_len": 256, **settings})
    try:
        texts, _ = await ask(calm)
        assert all(re.fullmatch(WORD, text) for text in texts)
        assert len(set(texts)) == len(texts)
        # Others with constraints of their own, so many that a small pool has to preempt.
        others = [ask(busy, seed=100 + i, prompt=f"{i} " * 40) for i in range(6)]
        (first, _), *rest = await asyncio.gather(ask(busy), *others)
        assert first == texts
        assert all(re.fullmatch(WORD, text) for found, _ in rest for text in found)
        again, answer = await ask(busy)
        assert again == texts
        if settings["num_kv_blocks"] > 100:
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        else:
            assert await busy.gauge("vllm:num_preemptions_total") > 0, "the case is to have preemptions"
        assert await streamed(busy) == texts
        cut, answer = await ask(busy, stop=["-"])
        assert cut == [text.partition("-")[0] for text in texts]
        assert {choice["stop_reason"] for choice in answer["choices"]} == {"-"}
        assert await streamed(busy, stop=["-"]) == cut
        await busy.settles()
    finally:
        await calm.end()
        await busy.end()
