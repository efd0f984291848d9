"""A recording holds no text, and its replay makes every decision again."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import ConfigError, ModelFileError
from headrace.core.recording import RecordWriter
from headrace.core.replay import Replay, read_recording, trace_recording
from headrace.core.watching import make_watching
from headrace.entrypoints.cli.main import main
from headrace.testing.requests import make_request
from headrace.testing.simulation import Simulation, make_scenario
from tests.observability.watched_core import WatchedCore


def record_mixed(path: Path, num_requests: int, seed: int = 1) -> WatchedCore:
    """Prompts that share prefixes, conversations that go on, preemptions, aborts."""
    random = Random(seed)
    settings = {"num_kv_blocks": 60, "max_num_seqs": 5, "max_num_batched_tokens": 32, "pipeline_depth": 2}
    core = WatchedCore(record=str(path), **settings)
    for number in range(num_requests):
        start = 131 * random.randrange(6)
        shared = [10 + (start + i) % 900 for i in range(random.randint(1, 60))]
        prompt = shared + [10 + random.randrange(900) for _ in range(random.randint(0, 20))]
        earlier = core.outputs.get(f"r{number - 9}")
        if earlier and random.random() < 0.5:
            prompt = (prompt + [t for output in earlier for t in output.new_token_ids])[:90]
        sampling = {"stop_token_ids": tuple(random.sample(range(1000), 20))}
        core.add(make_request(f"r{number}", prompt, random.randint(1, 30), seed=number, sampling=sampling))
        core.step(random.randint(0, 12))
        if random.random() < 0.05:
            core.core.abort_soon([f"r{random.randint(0, number)}"])
    core.run()
    core.core.shutdown()
    return core


def check(path: Path, at_least: int) -> None:
    result = Replay(str(path)).run()
    assert result.difference is None, result.difference
    assert result.num_steps >= at_least


def test_a_mixed_run_is_repeated(tmp_path: Path) -> None:
    core = record_mixed(tmp_path / "a.rec", 60)
    check(tmp_path / "a.rec", 200)
    stats = core.core.scheduler.make_stats()
    assert stats.num_preemptions and stats.prefix_hits, "the run was too tame"


@pytest.mark.long
def test_a_long_mixed_run_is_repeated(tmp_path: Path) -> None:
    record_mixed(tmp_path / "a.rec", 600, seed=3)
    check(tmp_path / "a.rec", 2000)


def repeat_simulation(seed: int, folder: Path) -> None:
    scenario = make_scenario(seed)
    config = scenario.config
    object.__setattr__(config.observability, "record", str(folder / f"{seed}.rec"))
    watching = make_watching(config, ManualClock())
    simulation = Simulation(scenario, seed, **watching.parts())
    simulation.run()
    simulation.core.shutdown()
    result = Replay(str(folder / f"{seed}.rec")).run()
    assert result.difference is None, f"seed {seed}: {result.difference}"


def test_simulations_with_faults_and_transfers_are_repeated(tmp_path: Path) -> None:
    for seed in range(25):
        repeat_simulation(seed, tmp_path)


@pytest.mark.long
def test_many_simulations_are_repeated(tmp_path: Path) -> None:
    for seed in range(25, 400):
        repeat_simulation(seed, tmp_path)


def test_a_changed_decision_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_mixed(tmp_path / "a.rec", 10)
    values = list(read_recording(str(tmp_path / "a.rec")))
    writer = RecordWriter(str(tmp_path / "b.rec"))
    values[0]["scheduler"]["max_num_seqs"] = 2
    for value in values:
        writer.write(value)
    writer.close()
    assert main(["replay", str(tmp_path / "a.rec")]) == 0
    assert "all decisions are the same" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "b.rec"), "--json"]) == 1
    assert "(schedule)" in json.loads(capsys.readouterr().out)["difference"]


def test_no_token_is_recorded(tmp_path: Path) -> None:
    core = WatchedCore(record=str(tmp_path / "a.rec"))
    core.run(make_request("secret-name", [777] * 40, 5))
    core.core.shutdown()
    data = (tmp_path / "a.rec").read_bytes()
    assert b"secret" not in data
    # msgpack spells 777 as cd 03 09.
    assert b"\xcd\x03\x09" not in data


def test_a_cut_file_is_a_valid_beginning(tmp_path: Path) -> None:
    record_mixed(tmp_path / "a.rec", 20)
    data = (tmp_path / "a.rec").read_bytes()
    (tmp_path / "cut.rec").write_bytes(data[: len(data) - 7])
    assert (
        len(list(read_recording(str(tmp_path / "cut.rec")))) == len(list(read_recording(str(tmp_path / "a.rec")))) - 1
    )


@pytest.mark.parametrize("data", [b"", b"text", b"\x04\x00\x00\x00text", b"\x01\x00\x00\x00\x80"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ModelFileError, match="recording"):
        list(read_recording(str(tmp_path / "x")))
    with pytest.raises(ModelFileError, match="No such file"):
        list(read_recording(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="--record"):
        RecordWriter(str(tmp_path / "none" / "x"))


def test_a_recording_becomes_a_trace(tmp_path: Path) -> None:
    record_mixed(tmp_path / "a.rec", 15)
    assert main(["trace", str(tmp_path / "a.rec"), "-o", str(tmp_path / "t.json")]) == 0
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace == trace_recording(str(tmp_path / "a.rec"))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {f"request-{n}" for n in range(15)} <= names
