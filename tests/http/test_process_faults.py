"""Faults in real processes over the real model: the culprit ends, all others get the tokens of a run without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server_process import ServerProcess
from tests.http_service import events_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FLAGS = ("--max-model-len", "256", "--kv-cache-memory", "32MiB", "--max-num-seqs", "8", "--served-model-name", "smol")
NUM_OTHERS = 5
LATE = 20
"""A position that is reached after some tokens."""


BODY = {"prompt": "The culprit says", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["depth1", "depth2", "depth3"])
def server(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[ServerProcess]:
    with ServerProcess(smollm2_gguf, *FLAGS, "--pipeline-depth", str(request.param), hooked=True) as process:
        process.wait_ready()
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> tuple[list[Any], str]:
    """What the others and the culprit are answered without a fault."""
    with ThreadPoolExecutor() as pool:
        return ask_all(server, pool), httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=120).text


def ask(server: ServerProcess, number: int) -> Any:
    """One of the others: greedy, seeded, with a grammar, with logprobs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"structured_outputs": {"regex": "[a-c]{30}"}, "seed": 2},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.3},
    ]
    body = {"prompt": f"Count {number}, {number + 1},", "max_tokens": 24, "return_token_ids": True, **kinds[number]}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def ask_all(server: ServerProcess, pool: ThreadPoolExecutor) -> list[Any]:
    return list(pool.map(lambda number: ask(server, number), range(NUM_OTHERS)))


def gauges(server: ServerProcess) -> list[float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{")
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)]


@pytest.mark.parametrize("repeat", ["once", "always"])
@pytest.mark.parametrize("phase", ["forward", "sample", "logits"])
@pytest.mark.parametrize("at", [0, LATE])
def test_a_fault_in_a_step(
    server: ServerProcess, undisturbed: tuple[list[Any], str], phase: str, repeat: str, at: int
) -> None:
    """B005."""
    name = f"fault.{phase}.{repeat}.{at}"
    alone, right = undisturbed
    with ThreadPoolExecutor() as pool:
        headers = {"X-Request-Id": name}
        culprit = pool.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=120)
        beside = ask_all(server, pool)
        reply = culprit.result()
    assert beside == alone
    # Logits that are not finite have a known row, which ends; a step that fails for nobody's sake is run again.
    if repeat == "once" and phase != "logits":
        assert texts(reply.text) == texts(right)
    else:
        check_failed(reply, name, at)
        logged = [line for line in server.lines if name in line and "failed" in line]
        cause = "not finite" if phase == "logits" else f"injected fault in {phase}"
        assert any(cause in line for line in logged), "the log names the request and the cause"
    assert gauges(server) == [0, 0, 0]
    assert httpx.get(f"{server.url}/health").status_code == 200


def texts(stream: str) -> list[str]:
    """The deltas, joined, and the finish reason."""
    choices = [event["choices"][0] for event in events_of(stream)[0]]
    return ["".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]]


def check_failed(reply: httpx.Response, name: str, at: int) -> None:
    if not at:
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    else:
        events, done = events_of(reply.text)
        assert not done
        assert len(events) > 1 and events[-1]["error"]["type"] == "server_error"
    assert name in reply.text
    assert not re.search("injected|finite", reply.text), "the cause is for the log"
