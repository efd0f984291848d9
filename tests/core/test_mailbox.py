"""The event loop's side of a client: replies find their callers, outputs their reader, death everybody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.base.errors import EngineDeadError, RequestFailedError
from headrace.core.inproc_client import InprocClient
from headrace.core.mailbox import Mailbox
from headrace.messages.outputs import ControlReply, EngineCoreOutput, EngineCoreOutputs
from headrace.messages.requests import AnyControl, Query
from headrace.testing.engine_config import make_engine_config
from headrace.testing.requests import make_request

NEWS = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r", new_token_ids=[1])])


def make_mailbox() -> tuple[Mailbox, list[None]]:
    taken: list[None] = []
    return Mailbox(lambda: taken.append(None)), taken


async def test_outputs_wait_for_their_reader_and_give_room_when_taken() -> None:
    mailbox, taken = make_mailbox()
    reading = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.deliver(NEWS)
    mailbox.deliver(NEWS)
    assert await reading is NEWS
    assert len(taken) == 1
    assert await mailbox.get() is NEWS
    mailbox.deliver(EngineCoreOutputs())
    assert len(taken) == 3, "an empty message takes no room"


@pytest.mark.parametrize("error", [None, "no"])
async def test_a_reply_goes_to_its_caller_once(error: str | None) -> None:
    mailbox, _ = make_mailbox()
    sent: list[AnyControl] = []

    async def send(request: AnyControl) -> None:
        sent.append(request)

    call = asyncio.create_task(mailbox.call(Query(topic="x"), send, 5.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (request,) = sent
    assert request.call_id is not None
    reply = ControlReply(call_id=request.call_id, value=3, error=error)
    for _ in range(2):
        mailbox.deliver(EngineCoreOutputs(replies=[reply, ControlReply(call_id=999)]))
    if error is None:
        assert await call == 3
    else:
        with pytest.raises(RequestFailedError, match=error):
            await call


async def test_a_call_without_reply_times_out_and_is_forgotten() -> None:
    mailbox, _ = make_mailbox()

    async def send(request: AnyControl) -> None:
        return None

    with pytest.raises(TimeoutError):
        await mailbox.call(Query(topic="x"), send, 0.01)
    mailbox.deliver(EngineCoreOutputs(replies=[ControlReply(call_id=1)]))


async def test_death_reaches_everybody_with_the_first_cause_after_what_came_before() -> None:
    mailbox, _ = make_mailbox()

    async def send(request: AnyControl) -> None:
        return None

    call = asyncio.create_task(mailbox.call(Query(topic="x"), send, 5.0))
    await asyncio.sleep(0)
    mailbox.deliver(NEWS)
    mailbox.deliver(EngineCoreOutputs(dead="the cause"))
    mailbox.fail("a consequence")
    with pytest.raises(EngineDeadError, match="the cause"):
        await call
    assert await mailbox.get() is NEWS
    with pytest.raises(EngineDeadError, match="the cause"):
        await mailbox.get()
    with pytest.raises(EngineDeadError, match="the cause"):
        await mailbox.call(Query(topic="x"), send, 5.0)


async def test_a_reader_that_lags_holds_up_the_core_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.inproc_client.MAILBOX_LIMIT", 3)
    client = InprocClient(make_engine_config(), "headrace.testing.simulated_executor:make_executor")
    await client.start()
    await client.add_request(make_request("r", max_tokens=40))
    while client._room.acquire(blocking=False):
        client._room.release()
        await asyncio.sleep(0)
    stuck = client.progress()
    tokens: list[Any] = []
    while len(tokens) < 40:
        tokens += [t for o in (await client.get_output()).outputs for t in o.new_token_ids]
    assert stuck < 40 + 10
    assert client.progress() > stuck
    await client.shutdown()
