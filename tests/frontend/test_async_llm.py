"""`AsyncLLM` over a played engine: streams, stops, aborts, groups, slow clients, death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.base.clock import ManualClock, SystemClock
from headrace.base.errors import EngineDeadError, InvalidRequestError, NotAcceptingError, QueueFullError
from headrace.frontend import async_llm
from headrace.frontend.answer import Answer
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, RequestTimes
from headrace.messages.request_output import RequestOutput
from headrace.messages.requests import EngineCoreRequest, ResetPrefixCache
from headrace.messages.runner_output import PromptLogprobs
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams
from headrace.testing.fake_client import FakeCoreClient, Script, fake_logprobs

from .conftest import READY, Start

DELTA = RequestOutputKind.DELTA
FINAL = RequestOutputKind.FINAL_ONLY
CUMULATIVE = RequestOutputKind.CUMULATIVE
ANSWER = " One, two, three, four. Count up: one, two, three, and then the end"


async def turn(count: int = 8) -> None:
    """Let tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


def plays(tokenizer: Tokenizer, text: str = ANSWER, *more: int) -> Script:
    ids = [*tokenizer.encode(text, add_special_tokens=False), *more]
    return lambda request: ids


def endless(request: EngineCoreRequest) -> list[int]:
    return [7] * 1000


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def joined(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(part.text for output in outputs for part in output.outputs if part.index == index)


def is_clean(llm: AsyncLLM, client: FakeCoreClient) -> bool:
    """Nothing is left of any request, on either side."""
    llm._processor.check_invariants()
    return llm.num_requests == 0 and not llm._streams and client.num_running == 0


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize("kind", [DELTA, FINAL, CUMULATIVE])
async def test_one_text_for_every_kind_of_output(
    kind: RequestOutputKind, tokens_per_step: int, start: Start, byte_level: Tokenizer
) -> None:
    script = plays(byte_level, ANSWER, 0)
    async with start(script, auto=True, tokens_per_step=tokens_per_step) as (llm, client):
        outputs = await collect(llm.generate("Count", SamplingParams(max_tokens=None, output_kind=kind)))
        last = outputs[-1]
        ids = script(client.added[0])
        assert (joined(outputs) if kind is DELTA else last.outputs[0].text) == ANSWER
        got = (
            [i for output in outputs for i in output.outputs[0].token_ids]
            if kind is DELTA
            else last.outputs[0].token_ids
        )
        assert got == ids
        assert last.finished and [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert last.outputs[0].finish_reason == "stop" and last.outputs[0].stop_reason is None
        assert last.prompt == "Count" and last.prompt_token_ids == byte_level.encode("Count")
        assert len(outputs) == 1 or kind is not FINAL
        assert is_clean(llm, client) and client.aborted == []


async def test_length_and_stop_tokens(start: Start, byte_level: Tokenizer) -> None:
    """B008: a stop token keeps all earlier text whole and is itself not shown."""
    ids = byte_level.encode(ANSWER, add_special_tokens=False)
    async with start(plays(byte_level), auto=True) as (llm, _):
        cut = (await collect(llm.generate("Count", SamplingParams(max_tokens=3, output_kind=FINAL))))[-1].outputs[0]
        assert (cut.finish_reason, cut.token_ids) == ("length", ids[:3])
        params = SamplingParams(max_tokens=None, stop_token_ids=(ids[2],), output_kind=FINAL)
        stopped = (await collect(llm.generate("Count", params)))[-1].outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", ids[2])
        assert stopped.text == byte_level.decode(ids[:2]) and stopped.token_ids == ids[:3]
        params = SamplingParams(
            max_tokens=None, stop_token_ids=(ids[2],), include_stop_str_in_output=True, output_kind=FINAL
        )
        shown = (await collect(llm.generate("Count", params)))[-1].outputs[0]
        assert shown.text == byte_level.decode(ids[:3])


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_at_every_place(
    include: bool, tokens_per_step: int, start: Start, byte_level: Tokenizer
) -> None:
    """B007, B008: the text is cut at the first match, streamed or not; later tokens leave no trace."""
    async with start(plays(byte_level), auto=True, tokens_per_step=tokens_per_step) as (llm, client):
        for place in range(21):
            stop = ANSWER[place : place + 3]
            end = ANSWER.index(stop) + (len(stop) if include else 0)
            for kind in (DELTA, FINAL):
                params = SamplingParams(
                    max_tokens=None, stop=stop, include_stop_str_in_output=include, output_kind=kind, logprobs=0
                )
                outputs = await collect(llm.generate("Count", params))
                last = outputs[-1].outputs[0]
                assert joined(outputs) == ANSWER[:end]
                assert (last.finish_reason, last.stop_reason) == ("stop", stop)
                ids = [i for output in outputs for i in output.outputs[0].token_ids]
                whole = byte_level.decode(ids)
                assert stop in whole and stop not in byte_level.decode(ids[:-1])
                assert sum(len(output.outputs[0].logprobs or []) for output in outputs) == len(ids)
        await turn()
        assert is_clean(llm, client)
        assert sorted(len(ids) for ids in client.aborted) == [1] * len(client.aborted)


async def test_min_tokens_delays_stop_strings(start: Start, byte_level: Tokenizer) -> None:
    text = "one, one, one, one"
    comma = [i for i, token in enumerate(byte_level.encode(text)) if "," in byte_level.token_text(token)]
    async with start(plays(byte_level, text), auto=True) as (llm, _):
        for place, first in enumerate(comma):
            params = SamplingParams(max_tokens=None, stop=",", min_tokens=first, output_kind=FINAL)
            answer = (await collect(llm.generate("Count", params)))[-1].outputs[0]
            assert answer.text == "one" + ", one" * place


async def test_text_is_held_only_while_it_may_become_a_stop(start: Start, byte_level: Tokenizer) -> None:
    """B004."""
    async with start(plays(byte_level)) as (llm, client):
        params = SamplingParams(max_tokens=8, stop="Z" * 20, output_kind=DELTA)
        stream = await llm.add_request("Count", params)
        for _ in range(8):
            client.step()
            output = await anext(stream)
            assert output.outputs[0].text == byte_level.decode(output.outputs[0].token_ids)


async def test_held_text_comes_out_at_the_end(start: Start, byte_level: Tokenizer) -> None:
    async with start(plays(byte_level, "one, two", 0), auto=True) as (llm, client):
        params = SamplingParams(max_tokens=None, stop="two!!", output_kind=DELTA)
        assert joined(await collect(llm.generate("a", params))) == "one, two"
        assert client.aborted == []


async def test_incomplete_characters_at_the_end(start: Start, byte_level: Tokenizer) -> None:
    parts = byte_level.encode("\U0001f600", add_special_tokens=False)
    async with start(lambda request: parts[:2], auto=True) as (llm, _):
        outputs = await collect(llm.generate("a", SamplingParams(max_tokens=None, output_kind=DELTA)))
        assert joined(outputs) == byte_level.decode(parts[:2])


async def test_no_text_when_none_is_wanted(start: Start, byte_level: Tokenizer) -> None:
    async with start(plays(byte_level), auto=True) as (llm, _):
        params = SamplingParams(max_tokens=4, detokenize=False)
        answer = (await collect(llm.generate("a", params)))[-1].outputs[0]
        assert answer.text == "" and len(answer.token_ids) == 4


# Slow consumers.


async def test_a_slow_client_gets_one_merged_delta(start: Start, byte_level: Tokenizer) -> None:
    async with start(plays(byte_level)) as (llm, client):
        stream = await llm.add_request("Count", SamplingParams(max_tokens=None, output_kind=DELTA, logprobs=1))
        client.step(1)
        first = await anext(stream)
        client.step(100)
        await turn(300)
        rest = await collect(stream)
        assert len(rest) == 1 and rest[0].finished
        assert first.outputs[0].text + rest[0].outputs[0].text == ANSWER
        assert len(rest[0].outputs[0].logprobs or []) == len(rest[0].outputs[0].token_ids)
        assert is_clean(llm, client)


async def test_cumulative_outputs_replace_each_other_and_stay_as_they_were(start: Start, byte_level: Tokenizer) -> None:
    async with start(plays(byte_level)) as (llm, client):
        stream = await llm.add_request("Count", SamplingParams(max_tokens=None, logprobs=1))
        client.step(2)
        await turn()
        first = await anext(stream)
        client.step(3)
        await turn()
        second = await anext(stream)
        assert [len(output.outputs[0].token_ids) for output in (first, second)] == [2, 5]
        assert [len(output.outputs[0].logprobs or []) for output in (first, second)] == [2, 5]
        assert second.outputs[0].text.startswith(first.outputs[0].text)
        stream.close()


# n, echo, logprobs.


@pytest.mark.parametrize("kind", [DELTA, FINAL, CUMULATIVE])
async def test_several_answers(kind: RequestOutputKind, start: Start, byte_level: Tokenizer) -> None:
    """B002: each index ends once; FINAL_ONLY shows them together and in order."""
    texts = ["one", " two, three, four", " the end, the end"]

    def script(request: EngineCoreRequest) -> list[int]:
        index = int(request.request_id.rsplit("-", 1)[1])
        return [*byte_level.encode(texts[index], add_special_tokens=False), 0]

    async with start(script, auto=True) as (llm, client):
        outputs = await collect(llm.generate("a", SamplingParams(n=3, max_tokens=None, output_kind=kind, seed=1)))
        if kind is DELTA:
            assert [joined(outputs, index) for index in range(3)] == texts
            ends = [part.index for output in outputs for part in output.outputs if part.finish_reason]
            assert sorted(ends) == [0, 1, 2]
            for output in outputs:
                assert [part.index for part in output.outputs] == sorted(part.index for part in output.outputs)
        else:
            assert [part.text for part in outputs[-1].outputs] == texts
            assert all(part.finish_reason == "stop" for part in outputs[-1].outputs)
        assert len(outputs) == 1 or kind is not FINAL
        assert is_clean(llm, client) and client.aborted == []


async def test_logprobs_of_answer_and_prompt(start: Start, byte_level: Tokenizer) -> None:
    """B013, B022, B023."""
    async with start(plays(byte_level), auto=True) as (llm, _):
        params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, output_kind=FINAL)
        output = (await collect(llm.generate("\n\n2) A box", params)))[-1]
        answer = output.outputs[0]
        assert answer.logprobs is not None and len(answer.logprobs) == 5
        for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
            assert next(iter(position)) == token_id and len(position) == 2
        named = zip(answer.token_ids, answer.logprobs, strict=True)
        assert "".join(position[i].decoded_token or "" for i, position in named) == answer.text
        assert answer.cumulative_logprob == pytest.approx(-2.5)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        shown = "".join(
            position[i].decoded_token or ""
            for i, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if position
        )
        assert "\n\n2) A box".endswith(shown) and len(shown) >= 8


async def test_scoring_without_an_answer(start: Start, byte_level: Tokenizer) -> None:
    """B022: max_tokens 0."""
    async with start(plays(byte_level), auto=True) as (llm, client):
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=0)
        output = (await collect(llm.generate("Is water wet? No", params)))[-1]
        answer = output.outputs[0]
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [], "length")
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert is_clean(llm, client)


async def test_prompt_logprobs_in_pieces_come_once_and_before_the_text(start: Start, byte_level: Tokenizer) -> None:
    """B025, B037: chunks, a repeated chunk after a preemption, no output before the first token."""
    async with start(endless) as (llm, client):
        params = SamplingParams(max_tokens=None, prompt_logprobs=0, output_kind=DELTA, n=2)
        stream = await llm.add_request([5, 6, 7, 8, 9], params)
        first, second = (child.request_id for child in client.added)

        def send(request_id: str, tokens: list[int], start: int = 0, ids: tuple[int, ...] = ()) -> None:
            piece = PromptLogprobs(start, [fake_logprobs(i, 0) for i in ids]) if start else None
            output = EngineCoreOutput(request_id=request_id, new_token_ids=tokens, prompt_logprobs=piece)
            client.send(EngineCoreOutputs(outputs=[output]))

        waiting = asyncio.ensure_future(anext(stream))
        send(second, [7])
        send(first, [], 1, (6, 7))
        send(first, [], 1, (6, 7, 8))
        await turn()
        assert not waiting.done()
        send(first, [7], 4, (9,))
        output = await waiting
        assert output.prompt_logprobs is not None
        assert [next(iter(position)) for position in output.prompt_logprobs if position] == [6, 7, 8, 9]
        assert [part.index for part in output.outputs] == [0, 1]
        send(first, [7])
        assert (await anext(stream)).prompt_logprobs is None
        stream.close()


# Leaving.


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_generator_aborts_once(n: int, start: Start) -> None:
    """B014, B020: all children of a request end."""
    async with start(endless, auto=True) as (llm, client):
        outputs = llm.generate("a", SamplingParams(n=n, max_tokens=None))
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        await turn()
        assert len(client.aborted) == 1 and len(client.aborted[0]) == n
        assert is_clean(llm, client)


async def test_leaving_when_some_answers_have_ended(start: Start) -> None:
    """B020."""

    def script(request: EngineCoreRequest) -> list[int]:
        return [7, 0] if request.request_id.endswith("-1") else [7] * 1000

    async with start(script) as (llm, client):
        for _ in range(50):
            stream = await llm.add_request("a", SamplingParams(n=4, max_tokens=None))
            client.step(2)
            await turn()
            await anext(stream)
            stream.close()
            stream.close()
        await turn()
        assert [len(ids) for ids in client.aborted] == [3] * 50
        assert is_clean(llm, client)


async def test_leaving_after_the_end_aborts_nothing(start: Start, byte_level: Tokenizer) -> None:
    async with start(plays(byte_level), auto=True) as (llm, client):
        async for output in llm.generate("a", SamplingParams(max_tokens=2, output_kind=FINAL)):
            assert output.finished
            break
        await turn()
        assert client.aborted == []


async def test_cancellation_at_every_await(start: Start, byte_level: Tokenizer) -> None:
    """B014: wherever a consumer is cancelled, nothing is left; an abort is sent iff something had been sent."""
    long = "one two " * 2000
    async with start(endless, ready=msgspec.structs.replace(READY, max_model_len=1 << 20)) as (llm, client):
        for delay in range(24):
            client.gate.clear() if delay % 2 else client.gate.set()
            task = asyncio.ensure_future(collect(llm.generate(long, SamplingParams(n=2, max_tokens=None))))
            await turn(delay)
            if delay > 12:
                await asyncio.to_thread(lambda: None)
                await turn(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            client.gate.set()
            await turn(12)
            assert is_clean(llm, client), delay


async def test_abort_by_name_gives_a_last_output(start: Start) -> None:
    """B019, B031: only requests of that name end; others go on."""
    async with start(endless) as (llm, client):
        mine = [await llm.add_request("a", SamplingParams(max_tokens=None), "x") for _ in range(2)]
        other = await llm.add_request("a", SamplingParams(max_tokens=5), "y")
        client.step()
        await turn()
        await llm.abort("x")
        await llm.abort(["x", "never"])
        for stream in mine:
            assert [output.outputs[0].finish_reason for output in await collect(stream)] == ["abort"]
        client.step(4)
        assert (await collect(other))[-1].outputs[0].finish_reason == "length"
        assert len(client.aborted) == 2 and is_clean(llm, client)


async def test_an_abort_that_overtakes_its_request(start: Start) -> None:
    """B014: whatever reaches the core after its abort is aborted again; nothing runs on for nobody."""
    async with start(endless) as (llm, client):
        client.gate.clear()
        sending = asyncio.ensure_future(llm.add_request("a", SamplingParams(max_tokens=None, n=3), "x"))
        await turn()
        await llm.abort("x")
        await turn()
        client.gate.set()
        assert [part.finish_reason for part in (await collect(await sending))[-1].outputs] == ["abort"] * 3
        await turn()
        assert len(client.added) == 1 and is_clean(llm, client)


async def test_equal_client_ids_do_not_meet(start: Start) -> None:
    """B031."""
    async with start(endless) as (llm, client):
        one = await llm.add_request("a", SamplingParams(max_tokens=3), "x")
        two = await llm.add_request("a", SamplingParams(max_tokens=6), "x")
        client.step(1)
        await turn()
        one.close()
        client.step(5)
        outputs = await collect(two)
        assert len(outputs[-1].outputs[0].token_ids) == 6 and outputs[-1].request_id == "x"
        await turn()
        assert [len(ids) for ids in client.aborted] == [1]


async def test_old_news_is_ignored(start: Start) -> None:
    async with start(endless) as (llm, client):
        client.send(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="gone", new_token_ids=[1])]))
        await turn()
        assert is_clean(llm, client)
        llm.check_health()


# Groups.


async def test_a_list_is_taken_whole_or_not_at_all(start: Start) -> None:
    """B083."""
    async with start(endless) as (llm, client):
        for bad in ([5] * 200, [], [5000], ""):
            with pytest.raises(InvalidRequestError):
                await llm.add_requests(["a", "b", bad, "c"], SamplingParams(max_tokens=2))
        assert client.added == [] and is_clean(llm, client)
        client.refuse.add(9)
        with pytest.raises(RuntimeError):
            await llm.add_requests([[5], [6], [7] * 9, [8]], SamplingParams(max_tokens=2))
        await turn()
        assert len(client.added) == 2
        assert {i for ids in client.aborted for i in ids} >= {request.request_id for request in client.added}
        assert is_clean(llm, client)
        streams = await llm.add_requests([[5], [6, 6]], SamplingParams(max_tokens=2))
        client.step(2)
        ends = [(await collect(stream))[-1] for stream in streams]
        assert [end.prompt_token_ids for end in ends] == [[5], [6, 6]]
        with pytest.raises(InvalidRequestError):
            await llm.add_requests([], SamplingParams())
        with pytest.raises(InvalidRequestError):
            await llm.add_requests(["a"], [])


# Faults.


async def test_a_failed_request_ends_alone(start: Start) -> None:
    async with start(endless) as (llm, client):
        bad = await llm.add_request("a", SamplingParams(max_tokens=None))
        good = await llm.add_request("b", SamplingParams(max_tokens=3))
        failure = EngineCoreOutput(
            request_id=client.added[0].request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error="NaN"
        )
        client.send(EngineCoreOutputs(outputs=[failure]))
        client.step(3)
        answer = (await collect(bad))[-1].outputs[0]
        assert (answer.finish_reason, answer.error) == ("error", "NaN")
        assert (await collect(good))[-1].outputs[0].finish_reason == "length"


async def test_a_fault_in_the_text_of_one_request_ends_that_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    true_add = Answer.add

    def add(self: Answer, output: EngineCoreOutput) -> int:
        if self.request_id == victim:
            raise ValueError("broken")
        return true_add(self, output)

    async with start(endless) as (llm, client):
        bad = await llm.add_request("a", SamplingParams(max_tokens=None))
        good = await llm.add_request("b", SamplingParams(max_tokens=3))
        victim = client.added[0].request_id
        monkeypatch.setattr(Answer, "add", add)
        client.step(3)
        assert (await collect(bad))[-1].outputs[0].finish_reason == "error"
        assert (await collect(good))[-1].outputs[0].finish_reason == "length"
        await turn()
        assert client.aborted == [[victim]] and is_clean(llm, client)


async def test_death_ends_every_stream_with_the_cause(start: Start) -> None:
    async with start(endless) as (llm, client):
        streams = [await llm.add_request("a", SamplingParams(max_tokens=None)) for _ in range(3)]
        waiting = [asyncio.ensure_future(collect(stream)) for stream in streams[:2]]
        client.step()
        await turn()
        client.die("out of memory: give the server less --kv-cache-memory")
        for future in waiting:
            with pytest.raises(EngineDeadError, match="out of memory"):
                await future
        with pytest.raises(EngineDeadError, match="out of memory"):
            await collect(streams[2])
        for call in (llm.add_request("a"), llm.add_requests(["a"]), llm.control(ResetPrefixCache())):
            with pytest.raises(EngineDeadError, match="out of memory"):
                await call
        with pytest.raises(EngineDeadError, match="out of memory"):
            llm.check_health()
        assert not llm.accepting and llm.num_requests == 0


async def test_death_while_a_request_is_being_sent(start: Start) -> None:
    async with start(endless) as (llm, client):
        client.gate.clear()
        sending = asyncio.ensure_future(llm.add_request("a"))
        await turn()
        client.die("killed")
        await turn()
        client.gate.set()
        with pytest.raises(EngineDeadError):
            await collect(await sending)
        assert llm.num_requests == 0 and not llm._streams


async def test_shutdown_ends_streams_as_aborted(start: Start) -> None:
    async with start(endless) as (llm, _):
        stream = await llm.add_request("a", SamplingParams(max_tokens=None))
        waiting = asyncio.ensure_future(collect(stream))
        await turn()
        await llm.shutdown()
        assert (await waiting)[-1].outputs[0].finish_reason == "abort"
        await llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.add_request("a")


async def test_drain_refuses_new_and_waits_for_old(start: Start) -> None:
    async with start(endless) as (llm, client):
        stream = await llm.add_request("a", SamplingParams(max_tokens=3))
        draining = asyncio.ensure_future(llm.drain(5.0))
        await turn()
        with pytest.raises(NotAcceptingError):
            await llm.add_request("b")
        assert not llm.accepting and not draining.done()
        client.step(3)
        assert (await collect(stream))[-1].outputs[0].finish_reason == "length"
        assert await draining
        assert await llm.drain(5.0), "nothing runs"


# Limits of the queue, health, observers.


async def test_a_full_queue_refuses_before_tokenising(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(endless, settings={"max_num_seqs": 2, "max_num_queued_reqs": 1}) as (llm, client):
        streams = [await llm.add_request("a", SamplingParams(max_tokens=None)) for _ in range(3)]
        monkeypatch.setattr(llm, "tokenize", None)
        with pytest.raises(QueueFullError, match="max_num_queued_reqs") as caught:
            await llm.add_request("a")
        assert caught.value.retry_after_s >= 1.0
        monkeypatch.undo()
        streams[0].close()
        (await llm.add_request("a")).close()
        with pytest.raises(QueueFullError):
            await llm.add_requests(["a", "b"])
        for stream in streams[1:]:
            stream.close()
        await turn()
        assert is_clean(llm, client)


async def test_queued_tokens_are_limited(start: Start) -> None:
    async with start(endless, settings={"max_num_queued_tokens": 10}) as (llm, client):
        first = await llm.add_request([5] * 50, SamplingParams(max_tokens=None))
        with pytest.raises(QueueFullError, match="max_num_queued_tokens"):
            await llm.add_request([5])
        client.step()
        await turn()
        second = await llm.add_request([5] * 8, SamplingParams(max_tokens=None))
        third = await llm.add_request([5] * 2, SamplingParams(max_tokens=None))
        for stream in (first, second, third):
            stream.close()


async def test_health_is_about_progress(start: Start) -> None:
    """B085: idle is green, work that moves is green, work that stands still is red until it moves again."""
    clock = ManualClock()
    async with start(endless, clock=clock) as (llm, client):
        watch = llm._watch

        def look(seconds: float) -> None:
            clock.advance(seconds)
            watch.observe(client.progress(), llm.num_requests > 0, clock.monotonic())

        look(100.0)
        llm.check_health()
        stream = await llm.add_request("a", SamplingParams(max_tokens=None))
        client.stuck = True
        look(4.0)
        llm.check_health()
        look(4.0)
        with pytest.raises(EngineDeadError, match="not moved"):
            llm.check_health()
        client.stuck = False
        client.step()
        look(0.5)
        llm.check_health()
        stream.close()


async def test_a_core_that_does_not_move_is_not_waited_for_in_vain(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_WATCH_INTERVAL_S", 0.02), ("HUNG_AFTER_S", 0.1), ("GIVE_UP_AFTER_S", 0.2)):
        monkeypatch.setattr(async_llm, name, value)
    async with start(endless, clock=SystemClock()) as (llm, client):
        begun = await llm.add_request("a", SamplingParams(max_tokens=None))
        client.step()
        await anext(begun)
        new = await llm.add_request("b", SamplingParams(max_tokens=None))
        with pytest.raises(NotAcceptingError, match="has not moved"):
            await collect(new)
        with pytest.raises(NotAcceptingError, match="has not moved"):
            await llm.add_request("c")
        await turn()
        assert client.aborted == [[client.added[1].request_id]]
        # Who has begun is waited for.
        assert llm.num_requests == 1
        client.step()
        await anext(begun)
        (await llm.add_request("d")).close()
        begun.close()


class Recorder:
    """An observer that writes down what it sees."""

    def __init__(self) -> None:
        self.started: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.finished: list[tuple[str, str]] = []
        self.rejected: list[str] = []
        self.times: list[RequestTimes] = []

    def request_started(self, request_id: str, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        self.started[request_id] = num_prompt_tokens

    def tokens_arrived(self, request_id: str, num_tokens: int, arrival: float, now: float, num_cached: int) -> None:
        self.tokens[request_id] = self.tokens.get(request_id, 0) + num_tokens

    def request_finished(self, request_id: str, reason: str, arrival: float, now: float, times: RequestTimes) -> None:
        self.finished.append((request_id, reason))
        self.times.append(times)

    def request_rejected(self, reason: str) -> None:
        self.rejected.append(reason)

    def stats_arrived(self, stats: object) -> None:
        pass


async def test_requests_that_end_here_keep_the_milestones_of_the_core(start: Start, byte_level: Tokenizer) -> None:
    recorder = Recorder()
    async with start(plays(byte_level), auto=True, observer=recorder, clock=ManualClock(5.0)) as (llm, _):
        await collect(llm.generate("Count", SamplingParams(max_tokens=None, stop="three", output_kind=FINAL)))
        await collect(llm.generate("Count", SamplingParams(max_tokens=0, output_kind=FINAL)))
    for times in recorder.times:
        assert 0.0 < times.arrival <= times.first_scheduled <= times.first_token <= times.last_token
    assert list(recorder.tokens.values())[1] == 0 and len(recorder.tokens) == 2


async def test_observers_see_each_request_once(start: Start, byte_level: Tokenizer) -> None:
    """P13: the sums are those of the clients."""
    recorder = Recorder()
    async with start(plays(byte_level), auto=True, observer=recorder) as (llm, client):
        for params in (
            SamplingParams(max_tokens=4, output_kind=FINAL),
            SamplingParams(max_tokens=None, stop="three", output_kind=FINAL),
            SamplingParams(n=3, max_tokens=2, output_kind=FINAL),
        ):
            output = (await collect(llm.generate("Count", params)))[-1]
            ids = [child.request_id for child in client.added[-params.n :]]
            assert sum(recorder.started[i] for i in ids) == len(output.prompt_token_ids)
            assert sum(recorder.tokens[i] for i in ids) == sum(len(part.token_ids) for part in output.outputs)
        stream = await llm.add_request("a", SamplingParams(max_tokens=None))
        stream.close()
        reasons = sorted(reason for _, reason in recorder.finished)
        assert reasons == ["abort", "length", "length", "length", "length", "stop"]
        assert len({request_id for request_id, _ in recorder.finished}) == len(recorder.started) == 6
