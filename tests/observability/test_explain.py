"""Explanations over HTTP: injected delays appear under their cause, and nearly all of the time is attributed."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from headrace.entrypoints.cli.main import main
from headrace.entrypoints.openai.insight import describe_requests
from headrace.frontend.tokenizer import Tokenizer
from headrace.observability.explain import CAUSES, MISSES, as_text, explain_request
from headrace.observability.marks import MarkBook, Marks
from tests.observability.live_service import Live, start_live
from tests.observability.test_trace import check_trace

StartLive = Callable[..., Awaitable[Live]]
CLOSE_MS = 5.0


@pytest.fixture
async def start() -> AsyncIterator[StartLive]:
    started: list[Live] = []

    async def begin(**options: Any) -> Live:
        started.append(await start_live(**options))
        return started[-1]

    yield begin
    for live in started:
        await live.end()


async def test_a_request_is_found_by_its_header_and_its_id(start: StartLive) -> None:
    live = await start()
    reply = await live.complete("mine", max_tokens=5)
    for name in ("mine", reply.json()["id"], reply.headers["x-request-id"]):
        found = await live.explain(name)
        assert found["id"] == "cmpl-mine"
        assert (found["state"], found["finish_reason"]) == ("finished", "length")
        assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (2, 5)
        assert found["attributed_share"] >= 0.99
        assert [count for _, count in found["grants"]] == [2, 1, 1, 1, 1]
        assert 0 < found["first_token_ms"] < found["wall_ms"]
    text = (await live.http.get("/v1/requests/mine/explain?format=text")).text
    assert text.startswith("request cmpl-mine: finished (length)")
    assert CAUSES["decode"] in text
    assert (await live.http.get("/v1/requests/nobody/explain")).status_code == 404
    assert (await live.http.get("/v1/requests/mine/explain?format=xml")).status_code == 400


async def test_the_command_line_explains(start: StartLive, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    live = await start(options={"api_key": ("secret",)})
    live.http.headers["Authorization"] = "Bearer secret"
    await live.complete("mine", max_tokens=5)
    where = ["--url", f"{live.url}/v1", "--api-key", "secret"]
    assert await asyncio.to_thread(main, ["explain", "mine", *where]) == 0
    assert "request cmpl-mine: finished" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["explain", "mine", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "cmpl-mine"
    assert await asyncio.to_thread(main, ["explain", "other", *where]) == 1
    assert "no such request" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["explain", "mine", "--url", live.url]) == 1
    assert "API key" in capsys.readouterr().err
    output = tmp_path / "trace.json"
    assert await asyncio.to_thread(main, ["trace", live.url, "--api-key", "secret", "-o", str(output)]) == 0
    assert json.loads(output.read_text())["traceEvents"]


async def test_the_key_guards_explanations(start: StartLive) -> None:
    live = await start(options={"api_key": ("secret",)})
    for path in ("/v1/requests/a/explain", "/v1/requests", "/v1/steps", "/v1/trace"):
        assert (await live.http.get(path)).status_code == 401


async def test_a_running_request_is_explained(start: StartLive) -> None:
    live = await start(step_s=0.01)
    running = asyncio.create_task(live.complete("long", max_tokens=200))
    async with asyncio.timeout(10):
        while (await live.http.get("/v1/requests/long/explain")).status_code == 404:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    found = await live.explain("long")
    assert found["state"] == "running"
    assert found["attributed_share"] >= 0.99
    await live.llm.abort("cmpl-long")
    await running
    async with asyncio.timeout(10):
        while (await live.explain("long"))["finish_reason"] != "abort":
            await asyncio.sleep(0.01)


async def test_names_with_slashes(start: StartLive) -> None:
    live = await start()
    await live.complete("team/job:1", max_tokens=2)
    assert (await live.explain("team%2Fjob:1"))["id"] == "cmpl-team/job:1"


async def test_each_of_n_answers(start: StartLive) -> None:
    live = await start()
    await live.complete("many", n=3, temperature=1, max_tokens=4)
    answers = (await live.explain("many"))["answers"]
    assert len({answer["request_id"] for answer in answers}) == 3
    assert all(answer["attributed_share"] >= 0.99 for answer in answers)


async def test_slow_tokenising_is_named(start: StartLive, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await start()
    plain = Tokenizer.encode
    taken_ms: list[float] = []

    def slowly(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        began = time.monotonic()
        time.sleep(0.1)
        token_ids = plain(self, text, add_special_tokens)
        taken_ms.append(1e3 * (time.monotonic() - began))
        return token_ids

    monkeypatch.setattr(Tokenizer, "encode", slowly)
    apart = []
    # On a crowded machine the process may lose the processor just between the two measurements.
    for attempt in range(3):
        taken_ms.clear()
        await live.complete(f"a{attempt}", max_tokens=2)
        found = await live.explain(f"a{attempt}")
        assert found["attributed_share"] >= 0.99
        apart.append(abs(found["totals_ms"]["tokenise"] - sum(taken_ms)))
    assert min(apart) < CLOSE_MS


async def test_slow_detokenising_is_named(start: StartLive, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await start(step_s=0.001)
    from headrace.frontend.answer import Answer

    plain = Answer.add

    def slowly(self: Answer, output: Any) -> int:
        time.sleep(0.02)
        return plain(self, output)

    monkeypatch.setattr(Answer, "add", slowly)
    await live.complete("a", max_tokens=20)
    found = await live.explain("a")
    # The core was done long before its 20 tokens of 20 ms each were turned into text.
    assert found["totals_ms"]["detokenise"] > 200
    assert found["attributed_share"] >= 0.99


async def test_a_slow_reader_is_named(start: StartLive) -> None:
    live = await start(step_s=0.0005, max_model_len=8192, num_kv_blocks=4097)
    # Small buffers on both sides, so that the answer cannot hide in the kernel.
    live.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plug.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plug, live.listener.getsockname()[:2])
    body = b'{"prompt": "ab", "max_tokens": 600, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: slow\r\nContent-Length: %d\r\n\r\n" % len(body)
    await asyncio.get_running_loop().sock_sendall(plug, head + body)
    with plug:
        async with asyncio.timeout(30):
            while (await live.http.get("/v1/requests/slow/explain")).status_code != 200:
                await asyncio.sleep(0.02)
            while (await live.explain("slow"))["state"] != "finished":
                await asyncio.sleep(0.05)
        ended = (await live.explain("slow"))["totals_ms"].get("socket_wait", 0)
        await asyncio.sleep(0.3)
        found = await live.explain("slow")
        assert found["totals_ms"]["socket_wait"] > ended + 290
        assert found["attributed_share"] >= 0.99


async def test_waiting_and_preemption_name_the_other(start: StartLive) -> None:
    live = await start(step_s=0.003, num_kv_blocks=33, max_model_len=120, watermark=0.0)
    old = asyncio.create_task(live.complete("old", prompt="x" * 50, max_tokens=60))
    await asyncio.sleep(0.02)
    await live.complete("new", prompt="y" * 50, max_tokens=60)
    await old
    found = await live.explain("new")
    # Whoever of the two lacked a block first.
    whom = found["preemptions"][0]["for"]
    assert whom in ("cmpl-old", "cmpl-new")
    assert found["preemptions"][0]["cause"] == "no_blocks"
    assert found["totals_ms"]["preempted"] > 10
    assert "preempted at" in as_text(found)


@pytest.mark.parametrize(
    ("beneficiary", "words"), [("other", "its KV blocks went to Other"), ("i", "no block was free")]
)
def test_a_preemption_says_once_why(beneficiary: str, words: str) -> None:
    marks = Marks(10.0)
    marks.external_id = "Mine"
    detail = {"cause": "no_blocks", "for": beneficiary, "step": 3}
    core = {
        "now": 14.0,
        "queued": 10.0,
        "finished": 0.0,
        "state": "preempted",
        "spans": [{"cause": "preempted", "start": 11.0, "end": 14.0, "detail": detail, "num_steps": 0}],
        "preemptions": [{**detail, "time": 11.0}],
    }
    found = explain_request(marks, "i", core, [], {"other": "Other", "i": "Mine"}.__getitem__, 14.0)
    lines = [line for line in as_text(found).splitlines() if "preempted" in line]
    told, total, span = (line.strip() for line in lines[1:])
    assert lines[0].startswith("request Mine: preempted")
    assert told.startswith(f"preempted at 1,000.0 ms: {words}")
    assert total.endswith(CAUSES["preempted"])
    assert words in span
    assert "Mine" not in "".join(lines[1:])


async def test_the_prefix_is_explained(start: StartLive) -> None:
    live = await start()
    await live.complete("first", prompt="a" * 40, max_tokens=1)
    await live.complete("second", prompt="a" * 30 + "b" * 10, max_tokens=1)
    found = await live.explain("second")
    assert found["prefix"]["local_hit"] == 28
    assert found["prefix"]["miss"] == {"block": 7, "first_token": 28, "reason": "text_differs", "token": 30}
    assert "the text differs from the cached one at token 30" in as_text(found)


@pytest.mark.slow
async def test_two_hundred_mixed_requests(start: StartLive) -> None:
    live = await start(step_s=0.002, max_num_seqs=16, max_num_batched_tokens=64, num_kv_blocks=300)
    random = Random(5)

    async def one(number: int) -> None:
        await asyncio.sleep(random.random() * 2)
        body: dict[str, Any] = {
            "prompt": "p" * random.randint(1, 40) + chr(97 + number % 7) * random.randint(1, 60),
            "max_tokens": random.randint(1, 40),
            "stream": random.random() < 0.5,
            "n": random.choice([1, 1, 1, 2]),
            "temperature": 1,
        }
        name, timeout = f"m{number}", 30.0
        if random.random() < 0.05:
            body, timeout = body | {"stream": False, "max_tokens": 150}, 0.05
        with suppress(httpx.ReadTimeout):
            await live.complete(name, timeout=timeout, **body)

    await asyncio.gather(*(one(number) for number in range(200)))
    await asyncio.sleep(0.1)
    shares = {}
    for number in range(200):
        found = await live.explain(f"m{number}")
        for answer in found.get("answers", [found]):
            shares[answer["request_id"]] = answer["attributed_share"]
            assert set(answer["totals_ms"]) <= CAUSES.keys()
    assert min(shares.values()) >= 0.99, {name: share for name, share in shares.items() if share < 0.99}


async def test_lists_and_traces(start: StartLive) -> None:
    live = await start()
    await live.complete("a", max_tokens=5)
    rows = (await live.http.get("/v1/requests")).json()["data"]
    assert [(row["id"], row["state"], row["num_output_tokens"]) for row in rows] == [("cmpl-a", "finished", 5)]
    steps = (await live.http.get("/v1/steps")).json()["data"]
    assert sum(step["num_tokens"] for step in steps) == 6
    later = (await live.http.get(f"/v1/steps?after={steps[1]['step']}")).json()["data"]
    assert later == steps[2:]
    assert (await live.http.get("/v1/steps?after=x")).status_code == 400
    events = (await live.http.get("/v1/trace")).json()["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert kinds == {"M", "X", "C", "s", "f"}
    named = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    assert "cmpl-a" in named and "steps" in named


async def test_a_crowd_that_waits_does_not_hide_what_ended(start: StartLive) -> None:
    live = await start(step_s=0.002, max_num_seqs=1)
    for number in range(4):
        await live.complete(f"early{number}", max_tokens=1)
    crowd = [asyncio.create_task(live.complete(f"late{number}", max_tokens=60)) for number in range(12)]
    async with asyncio.timeout(10):
        while len(await describe_requests(live.context, 100)) < 16:
            await asyncio.sleep(0.01)
    rows = await describe_requests(live.context, 8)
    assert [row["state"] for row in rows] == ["running"] + 5 * ["waiting"] + 2 * ["finished"]
    assert rows[0]["num_output_tokens"] >= 0 and rows[1]["waiting_reason"] == "running_limit"
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


def test_marks_are_bounded() -> None:
    book = MarkBook(max_kept=10)
    for number in range(50):
        marks = Marks(float(number))
        book.bind(marks, f"e{number}", [f"i{number}"], number + 0.5)
        book.ended([f"i{number}"], number + 1.0, number + 1.5)
    assert len(book) <= 11
    assert book.find("e0") is None and book.find("i0") is None
    assert book.find("i49") is book.find("e49") is not None
    assert book.name_of("i49") == "e49"


def test_gaps_count_as_unattributed() -> None:
    marks = Marks(0.0)
    book = MarkBook()
    book.bind(marks, "e", ["i"], 1.0)
    book.ended(["i"], 10.0, 10.0)
    found = explain_request(marks, "i", None, [], book.name_of, 20.0)
    assert found["attributed_share"] == pytest.approx(0.1)
    assert found["state"] == "finished"


def test_every_miss_has_words() -> None:
    for reason, words in MISSES.items():
        assert words.format(step=1, token=2, other="x"), reason


async def test_counters_equal_the_clients_sums_after_preemptions(start: StartLive) -> None:
    live = await start(step_s=0.001, num_kv_blocks=40, max_model_len=120, watermark=0.0)
    replies = await asyncio.gather(*(live.complete(f"p{n}", prompt=chr(97 + n) * 50, max_tokens=60) for n in range(6)))
    await asyncio.sleep(0.3)
    usages = [reply.json()["usage"] for reply in replies]
    lines = (await live.http.get("/metrics")).text.splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert values["vllm:num_preemptions_total"] > 0
    assert values["headrace:recompute_tokens_total"] > 0
    assert values["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert values["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert any(line.startswith("headrace:step_phase_seconds_total{") and 'phase="forward"' in line for line in lines)


async def test_a_trace_over_http(start: StartLive) -> None:
    live = await start(pipeline_depth=3)
    await asyncio.gather(*(live.complete(f"t{n}", prompt=chr(97 + n) * 20, max_tokens=15) for n in range(4)))
    trace = (await live.http.get("/v1/trace")).json()
    check_trace(trace)
    assert len([event for event in trace["traceEvents"] if event["ph"] == "f"]) >= 4


async def test_usage_carries_timing_on_request(start: StartLive) -> None:
    live = await start(step_s=0.01)
    usage = (await live.complete("a", max_tokens=5)).json()["usage"]
    assert "timing" not in usage
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "return_timing": True}
    whole = (await live.http.post("/v1/chat/completions", json=body | {"ignore_eos": True})).json()["usage"]["timing"]
    assert whole["prefill_ms"] >= 9 and whole["decode_ms"] >= 20 and whole["num_preemptions"] == 0
    fields = body | {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    lines = (await live.http.post("/v1/chat/completions", json=fields)).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert last["usage"]["timing"]["decode_ms"] >= 20


async def test_prompts_are_shown_to_their_owner_alone_and_only_if_kept(
    start: StartLive, capsys: pytest.CaptureFixture[str]
) -> None:
    def key(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}"}

    quiet = await start(options={"api_key": ("ann", "bob")})
    quiet.http.headers.update(key("ann"))
    await quiet.complete("a", prompt="secret", max_tokens=1)
    assert (await quiet.http.get("/v1/requests/a/explain?prompt=true")).status_code == 403
    live = await start(options={"api_key": ("ann", "bob")}, explain_prompts=True)
    live.http.headers.update(key("ann"))
    await live.complete("a", prompt="secret", max_tokens=1)
    assert live.llm.tokenizer is not None
    await live.complete("b", prompt=live.llm.tokenizer.encode("se", False), max_tokens=1)
    assert (await live.http.get("/v1/requests/a/explain?prompt=true")).json()["prompts"] == ["secret"]
    assert (await live.http.get("/v1/requests/b/explain?prompt=true")).json()["prompts"] == ["se"]
    assert "prompts" not in (await live.explain("a"))
    theirs = await live.http.get("/v1/requests/a/explain?prompt=true", headers=key("bob"))
    assert theirs.status_code == 403 and "secret" not in theirs.text
    plain = await live.http.get("/v1/requests/a/explain", headers=key("bob"))
    assert plain.status_code == 200 and "secret" not in plain.text
    assert (await live.http.get("/v1/requests/a/explain?prompt=maybe")).status_code == 400
    command = ["explain", "a", "--prompt", "--url", live.url, "--api-key", "ann"]
    assert await asyncio.to_thread(main, command) == 0
    assert capsys.readouterr().out.endswith("prompt\nsecret\n")


@pytest.mark.parametrize("across", [False, True])
async def test_another_keys_text_was_never_seen_unless_allowed(start: StartLive, across: bool) -> None:
    live = await start(options={"api_key": ("ann", "bob")}, explain_across_salts=across)

    async def ask(name: str, key: str, prompt: str) -> dict[str, Any]:
        live.http.headers["Authorization"] = f"Bearer {key}"
        await live.complete(name, prompt=prompt, max_tokens=1)
        return (await live.explain(name))["prefix"]

    await ask("first", "ann", "a" * 40)
    apart = await ask("second", "bob", "a" * 30 + "b" * 10)
    assert apart["miss"]["reason"] == ("text_differs" if across else "never_seen")
    assert (await ask("third", "ann", "a" * 30 + "c" * 10))["miss"]["reason"] == "text_differs"
    # What bob found in the cache he has seen himself.
    assert (await ask("fourth", "bob", "a" * 26 + "d" * 14))["miss"] == {
        "block": 6,
        "first_token": 24,
        "reason": "text_differs",
        "token": 26,
    }
