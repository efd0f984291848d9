"""Sends a list of requests: when their time has come (open loop), or when an earlier one has ended (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from headrace.entrypoints.bench.client import BenchClient
from headrace.entrypoints.bench.statistics import RequestRecord

OnDone = Callable[[RequestRecord], None]


async def run_open_loop(
    client: BenchClient, path: str, bodies: Sequence[bytes], arrivals: Sequence[float], on_done: OnDone
) -> list[RequestRecord]:
    """Send each body at its arrival, however many are still running.

    Returns:
        Records in the order of ``bodies``.
    """
    start = time.perf_counter()
    records = [RequestRecord(due=start + arrival) for arrival in arrivals]

    async def send(body: bytes, record: RequestRecord) -> None:
        await client.stream(path, body, record)
        on_done(record)

    async with asyncio.TaskGroup() as group:
        for body, record in zip(bodies, records, strict=True):
            await asyncio.sleep(record.due - time.perf_counter())
            group.create_task(send(body, record))
    return records


async def run_closed_loop(
    client: BenchClient, path: str, bodies: Sequence[bytes], concurrency: int, on_done: OnDone
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests running until all have been sent; records are in the order of ``bodies``."""
    records: list[RequestRecord] = []
    waiting = iter(bodies)

    async def work() -> None:
        for body in waiting:
            record = RequestRecord(due=time.perf_counter())
            records.append(record)
            await client.stream(path, body, record)
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(work())
    return records
