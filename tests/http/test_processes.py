"""What happens to a real server process: hang-ups, a stopped and a killed core, draining, signals.

The executor is simulated, so that a step takes as long as the test says; everything else is real.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
COUNT = "1, 2, 3, 4, 5, 6,"
FLAGS = ("--max-model-len", "256", "--num-kv-blocks", "65", "--max-num-seqs", "8", "--served-model-name", "smol")
STEP_S = 0.05
LONG: dict[str, Any] = {"prompt": COUNT, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    with ServerProcess(smollm2_gguf, *FLAGS, simulated_step_s=STEP_S) as process:
        process.wait_ready()
        yield process
        assert process.stop() == 0


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).rsplit(" ", 1)[-1])


def test_a_hangup_frees_everything(server: ServerProcess) -> None:
    """B014, B089."""
    for more in ({"stream": False}, {"n": 3}, {"prompt": ["a", "b"]}):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=LONG | more, timeout=httpx.Timeout(5, read=0.3))
        deadline = time.monotonic() + 30
        while gauge(server.url, "vllm:num_requests_running") or gauge(server.url, "vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_stopped_core_is_red_and_recovers(server: ServerProcess) -> None:
    """B085."""
    core = server.core_pid()
    answers: list[int] = []
    body = {"prompt": "a", "max_tokens": 2}
    os.kill(core, signal.SIGSTOP)
    try:
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code)
        )
        thread.start()
        deadline = time.monotonic() + 10
        while httpx.get(f"{server.url}/health").status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(core, signal.SIGCONT)
    thread.join()
    assert answers == [200]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_death_of_the_core(smollm2_gguf: Path) -> None:
    """B086: streams end with an error, health is red, the exit status is not 0, the last line names the cause."""
    with ServerProcess(smollm2_gguf, *FLAGS, "--death-grace-s", "3", simulated_step_s=STEP_S) as server:
        url = server.wait_ready()
        body = LONG | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            killed = time.monotonic()
            os.kill(server.core_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
            assert time.monotonic() - killed < 2
        assert '"error"' in rest[-1]
        assert "SIGKILL" in rest[-1], "whom it hits is told why"
        assert httpx.get(f"{url}/health").status_code == 503
        assert server.wait(20) == 1
        assert server.lines[-1].startswith("headrace: error: ")
        assert "SIGKILL" in server.lines[-1]


def test_draining(smollm2_gguf: Path) -> None:
    """B088."""
    with ServerProcess(smollm2_gguf, *FLAGS, "--drain-s", "120", simulated_step_s=STEP_S) as server:
        url = server.wait_ready()
        # Long enough for all that is asked beside it, however slow the machine.
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            assert client.get("/ready").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while client.get("/ready").status_code != 503:
                assert time.monotonic() < deadline
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(30) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_an_impatient_stop_ends_streams(smollm2_gguf: Path, signals: int) -> None:
    """B088: without patience, or after a second signal, streams end at once."""
    with ServerProcess(
        smollm2_gguf, *FLAGS, "--drain-s", "0" if signals == 1 else "120", simulated_step_s=STEP_S
    ) as server:
        url = server.wait_ready()
        body = LONG | {"stream": True}
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
