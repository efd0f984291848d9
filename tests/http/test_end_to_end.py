"""The whole chain: the ``openai`` client, real sockets, a real server process, the real model."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest

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
