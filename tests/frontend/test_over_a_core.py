"""`AsyncLLM` over a real core with simulated tokens: streams, odd ways out, nothing left."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.core.inproc_client import InprocClient
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.request_output import RequestOutput
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams
from headrace.testing.engine_config import make_architecture, make_engine_config

EXECUTOR = "headrace.testing.simulated_executor:make_executor"


async def consume(llm: AsyncLLM, seed: int, kind: RequestOutputKind, leave_after: int | None) -> list[list[int]]:
    """Token ids per answer, as far as they were taken."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 400) for _ in range(rng.randrange(1, 40))]
    n = rng.randrange(1, 4)
    params = SamplingParams(
        n=n, seed=seed, max_tokens=rng.randrange(1, 30), temperature=0.8, output_kind=kind, ignore_eos=True
    )
    ids: list[list[int]] = [[] for _ in range(n)]
    stream = await llm.add_request(prompt, params)
    count = 0
    try:
        async for output in stream:
            take(output, ids, kind)
            count += 1
            if leave_after is not None and count > leave_after:
                break
    finally:
        stream.close()
    return ids


def take(output: RequestOutput, ids: list[list[int]], kind: RequestOutputKind) -> None:
    for part in output.outputs:
        ids[part.index] = ids[part.index] + part.token_ids if kind is RequestOutputKind.DELTA else part.token_ids


@pytest.mark.parametrize("depth", [1, 2])
async def test_mixed_requests_equal_their_solo_runs(depth: int, byte_level: Tokenizer) -> None:
    """B014, B026, B029: some consumers leave or are cancelled; the others get what they get alone."""
    config = make_engine_config(make_architecture(eos_token_ids=(999,)), pipeline_depth=depth)
    llm = AsyncLLM(InprocClient(config, EXECUTOR), config, byte_level)
    await llm.start()
    try:
        kinds = list(RequestOutputKind)
        solo = [await consume(llm, seed, RequestOutputKind.FINAL_ONLY, None) for seed in range(12)]
        tasks = [asyncio.ensure_future(consume(llm, seed, kinds[seed % 3], None)) for seed in range(12)]
        leaving = [
            asyncio.ensure_future(consume(llm, seed + 100, RequestOutputKind.DELTA, seed % 4)) for seed in range(8)
        ]
        cancelled = [
            asyncio.ensure_future(consume(llm, seed + 200, RequestOutputKind.DELTA, None)) for seed in range(8)
        ]
        for place, task in enumerate(cancelled):
            await asyncio.sleep(0.001 * place)
            task.cancel()
        assert await asyncio.gather(*tasks) == solo
        await asyncio.gather(*leaving)
        await asyncio.gather(*cancelled, return_exceptions=True)
        assert await llm.drain(10.0), "aborts reach the core"
        llm._processor.check_invariants()
        assert llm.num_requests == 0 and not llm._streams
        llm.check_health()
    finally:
        await llm.shutdown()
