"""However an engine dies: every stream ends, health is red at once, and the exit names the cause and the remedy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
FLAGS = ("--max-model-len", "256", "--num-kv-blocks", "65", "--max-num-seqs", "8", "--served-model-name", "smol")
GRACE_S = 2.5
TOLD_WITHIN_S = 2.0
NUM_STREAMS = 3
BODY: dict[str, Any] = {"prompt": "1, 2, 3,", "max_tokens": 200, "ignore_eos": True}
MORE_MEMORY = "--kv-cache-memory"

DEATHS: dict[str, tuple[dict[str, Any], int | None, list[str]]] = {
    "killed": ({}, signal.SIGKILL, ["SIGKILL", "memory is short", MORE_MEMORY]),
    "segmentation fault": ({}, signal.SIGSEGV, ["SIGSEGV", "restart"]),
    "worker": ({"die_at": 40}, None, ["a simulated worker died"]),
    "out of memory": ({"crash_at": 40, "crash": "memory"}, None, ["out of memory", MORE_MEMORY]),
    "missing file": ({"crash_at": 40, "crash": "file"}, None, ["a file", "No such file", "/models/weights"]),
    "exception": ({"crash_at": 40, "crash": "fault"}, None, ["ValueError: a simulated crash", "restart"]),
}


class Streams:
    """Clients of a server that dies under them; ``lines`` are those of each, ``ended`` when the last one ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begun = threading.Semaphore(0)
        self.ended = 0.0

    def read(self, _: int) -> list[str]:
        with httpx.stream("POST", f"{self._url}/v1/completions", json={**BODY, "stream": True}, timeout=60) as reply:
            lines = reply.iter_lines()
            found = [next(lines)]
            self._begun.release()
            found += [line for line in lines if line]
        self.ended = time.monotonic()
        return found

    def whole(self) -> httpx.Response:
        return httpx.post(f"{self._url}/v1/completions", json=BODY, timeout=60)

    def wait_begun(self) -> None:
        for _ in range(NUM_STREAMS):
            assert self._begun.acquire(timeout=60)


def check_death(server: ServerProcess, kill: Callable[[], Any] | None, words: list[str]) -> None:
    """Everything that a death must bring; without ``kill`` the engine dies by itself."""
    streams = Streams(server.url)
    probe = httpx.Client(base_url=server.url)
    with ThreadPoolExecutor() as pool:
        reading = [pool.submit(streams.read, number) for number in range(NUM_STREAMS)]
        waiting = pool.submit(streams.whole)
        streams.wait_begun()
        if kill is not None:
            kill()
        died = time.monotonic()
        while probe.get("/health").status_code == 200:
            assert kill is None or time.monotonic() < died + TOLD_WITHIN_S
        red = time.monotonic()
        ends = [one.result()[-1] for one in reading]
        refused = waiting.result()
    assert all(end.startswith("data: {") and '"error"' in end for end in ends), ends
    assert abs(streams.ended - red) < TOLD_WITHIN_S
    assert refused.status_code == 503
    assert "/models" not in refused.text + "".join(ends)
    late = probe.post("/v1/completions", json=BODY)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
    probe.close()
    assert server.wait(GRACE_S + 10) == 1
    assert time.monotonic() - red > GRACE_S - TOLD_WITHIN_S
    last = server.lines[-1]
    assert last.startswith("headrace: error: ")
    assert all(word in last for word in words), last


@pytest.mark.parametrize("name", DEATHS)
def test_deaths(smollm2_gguf: Path, name: str) -> None:
    """B086, B005."""
    options, number, words = DEATHS[name]
    flags = (*FLAGS, "--death-grace-s", str(GRACE_S))
    with ServerProcess(smollm2_gguf, *flags, simulated_step_s=0.05, simulated=options) as server:
        server.wait_ready()
        core = server.core_pid()
        check_death(server, None if number is None else lambda: os.kill(core, number), words)


def test_a_worker_of_several_dies(smollm2_gguf: Path) -> None:
    """The worker is the core's child; its death is the core's, and travels on."""
    flags = (*FLAGS, "--death-grace-s", str(GRACE_S), "--tensor-parallel-size", "3")
    with ServerProcess(smollm2_gguf, *flags) as server:
        server.wait_ready()
        core = server.core_pid()
        workers = list(map(int, Path(f"/proc/{core}/task/{core}/children").read_text().split()))
        assert len(workers) == 3
        check_death(server, lambda: os.kill(workers[1], signal.SIGKILL), ["worker 1", "SIGKILL", MORE_MEMORY])
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_core_that_dies_while_it_starts(smollm2_gguf: Path) -> None:
    with ServerProcess(smollm2_gguf, *FLAGS, simulated_step_s=0.0, simulated={"start_s": 120}) as server:
        deadline = time.monotonic() + 60
        while (core := find_core(server)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(core, signal.SIGKILL)
        assert server.wait(30) == 1
        last = server.lines[-1]
        assert all(word in last for word in ("headrace: error: ", "while starting", "SIGKILL", MORE_MEMORY)), last


def find_core(server: ServerProcess) -> int | None:
    try:
        return server.core_pid()
    except StopIteration:
        return None


def test_a_model_whose_weights_are_missing(tmp_path: Path, smollm2_gguf: Path) -> None:
    broken = tmp_path / "model.gguf"
    with smollm2_gguf.open("rb") as whole:
        broken.write_bytes(whole.read(32 << 20))
    with ServerProcess(broken, *FLAGS) as server:
        assert server.wait(60) == 1
        assert server.lines[-1].startswith("headrace: error: ")
        assert "model.gguf" in server.lines[-1]
