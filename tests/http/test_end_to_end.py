"""The whole chain: the ``openai`` client, real sockets, a real server process, the real model."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.http.conftest import SMALL
from tests.http.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COUNT = "1, 2, 3, 4, 5, 6,"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol"]
    assert client.models.retrieve("smol").id == "smol"


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Say hi."}]
    fields = {"model": "smol", "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**fields, top_logprobs=2)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            **fields, top_logprobs=2, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_completions(client: openai.OpenAI) -> None:
    fields = {"model": "smol", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt=COUNT, **fields)  # type: ignore[call-overload]
    both = client.completions.create(prompt=[COUNT, "a b c d e"], **fields)  # type: ignore[call-overload]
    assert both.choices[0].text == one.choices[0].text
    assert both.choices[1].index == 1
    scored = client.completions.create(  # type: ignore[call-overload]
        prompt=COUNT, **(fields | {"max_tokens": 0, "echo": True, "logprobs": 1})
    )
    assert scored.choices[0].text == COUNT
    assert len(scored.choices[0].logprobs.tokens) == scored.usage.prompt_tokens
    again = client.completions.create(prompt=COUNT * 5, **fields)  # type: ignore[call-overload]
    again = client.completions.create(prompt=COUNT * 5, **fields)  # type: ignore[call-overload]
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_seeds_hold_among_others(client: openai.OpenAI) -> None:
    """B026."""
    fields = {"model": "smol", "prompt": "Once", "max_tokens": 5, "temperature": 0.9}
    alone = client.completions.create(**fields, seed=11)  # type: ignore[call-overload]
    texts: dict[int, str] = {}

    def ask(place: int) -> None:
        seed = {"seed": 11} if place == 0 else {}
        texts[place] = client.completions.create(**fields, **seed).choices[0].text  # type: ignore[call-overload]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[0] == alone.choices[0].text


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="x")
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model="smol", prompt="x " * 400)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="smol", prompt="x", temperature=9)
    assert error.value.param == "temperature"  # type: ignore[attr-defined]


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).rsplit(" ", 1)[-1])


def test_a_hangup_frees_everything(server: ServerProcess) -> None:
    """B014, B089."""
    body = {"prompt": COUNT, "max_tokens": 200, "ignore_eos": True, "n": 2}
    for stream in (True, False):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions", json=body | {"stream": stream}, timeout=httpx.Timeout(5, read=0.1)
            )
        deadline = time.monotonic() + 30
        while gauge(server.url, "vllm:num_requests_running") or gauge(server.url, "vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_stopped_core_is_red_and_recovers(server: ServerProcess, client: openai.OpenAI) -> None:
    """B085."""
    import os

    core = server.core_pid()
    answers: list[openai.types.Completion] = []
    os.kill(core, signal.SIGSTOP)
    try:
        thread = threading.Thread(
            target=lambda: answers.append(client.completions.create(model="smol", prompt="a", max_tokens=2))
        )
        thread.start()
        deadline = time.monotonic() + 10
        while httpx.get(f"{server.url}/health").status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(core, signal.SIGCONT)
    thread.join()
    assert answers
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_death_of_the_core(smollm2_gguf: Path) -> None:
    """B086: streams end with an error, health is red, the exit status is not 0, the last line names the cause."""
    import os

    server = ServerProcess(smollm2_gguf, *SMALL, "--death-grace-s", "3")
    url = server.wait_ready()
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        killed = time.monotonic()
        os.kill(server.core_pid(), signal.SIGKILL)
        rest = [line for line in lines if line]
        assert time.monotonic() - killed < 2
    assert '"error"' in rest[-1]
    assert "SIGKILL" in rest[-1]
    assert httpx.get(f"{url}/health").status_code == 503
    assert server.wait(20) == 1
    assert server.lines[-1].startswith("headrace: error: ")
    assert "SIGKILL" in server.lines[-1]


def test_draining(smollm2_gguf: Path) -> None:
    """B088."""
    server = ServerProcess(smollm2_gguf, *SMALL, "--drain-s", "120")
    url = server.wait_ready()
    body = {"prompt": "a", "max_tokens": 12, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/ready").status_code != 503:
            assert time.monotonic() < deadline
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait(30) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_an_impatient_stop_ends_streams(smollm2_gguf: Path, signals: int) -> None:
    """B088: without patience, or after a second signal, streams end at once."""
    server = ServerProcess(smollm2_gguf, *SMALL, "--drain-s", "0" if signals == 1 else "120")
    url = server.wait_ready()
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-2]
    assert server.wait(15) == 0
