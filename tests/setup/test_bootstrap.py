"""The set-up program: its checks, its one-line remedies, and that a second run does nothing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, pointed at an empty checkout."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "setup_key", lambda torch_index: f"key {torch_index}")
    monkeypatch.delenv("CI", raising=False)
    return module


@pytest.fixture
def commands(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be run, instead of running it; making the environment makes its folder."""
    seen: list[str] = []

    def run(command: list[str], problem: str) -> None:
        seen.append(" ".join(command))
        if "venv" in command:
            (bootstrap.VENV / "bin").mkdir(parents=True)
            (bootstrap.VENV / "bin" / "python").touch()
        if bootstrap.TORCH in command:
            (bootstrap.VENV / "torch").touch()

    monkeypatch.setattr(bootstrap, "run", run)
    monkeypatch.setattr(bootstrap, "has_torch", lambda: (bootstrap.VENV / "torch").exists())
    monkeypatch.setattr(bootstrap, "announced_size", lambda command: 0)
    return seen


def test_order_and_second_run(bootstrap: ModuleType, commands: list[str]) -> None:
    assert bootstrap.main(["serve"]) == 0
    steps = [command.rpartition("pip ")[2] for command in commands]
    assert "-m venv" in commands[0]
    assert bootstrap.TORCH in commands[1] and "index-url" not in commands[1]
    assert "scikit-build-core" in commands[2]
    assert "--editable" in commands[3] and "[test" not in commands[3]
    assert len(steps) == 4
    assert bootstrap.main(["serve"]) == 0
    assert len(commands) == 4


def test_tests_add_to_what_serving_has(bootstrap: ModuleType, commands: list[str]) -> None:
    bootstrap.main(["serve"])
    del commands[:]
    assert bootstrap.main(["test"]) == 0
    assert not any("-m venv" in command or bootstrap.TORCH in command for command in commands)
    assert any("[test,dev]" in command for command in commands)


def test_another_torch_index_replaces_torch(bootstrap: ModuleType, commands: list[str]) -> None:
    bootstrap.main(["serve"])
    del commands[:]
    assert bootstrap.main(["serve", "--torch-index", "https://example.org/cpu"]) == 0
    torch = next(command for command in commands if bootstrap.TORCH in command)
    assert "--index-url https://example.org/cpu" in torch and "--force-reinstall" in torch


def test_a_failed_step_is_one_line_and_leaves_no_stamp(
    bootstrap: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], problem: str) -> None:
        raise bootstrap.SetupError(f"{problem}: no luck")

    monkeypatch.setattr(bootstrap, "run", fail)
    assert bootstrap.main(["serve"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "headrace: the virtual environment could not be created: no luck"
    assert not list(bootstrap.VENV.glob(".ready-*"))


def test_old_python(bootstrap: ModuleType) -> None:
    bootstrap.check_python((3, 11))
    with pytest.raises(bootstrap.SetupError, match=r"3\.9 is too old; .*PYTHON="):
        bootstrap.check_python((3, 9))


def test_missing_venv_module(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.check_venv_module()
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(bootstrap.SetupError, match="apt-get install python3-venv"):
        bootstrap.check_venv_module()


def test_full_disk(bootstrap: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(bootstrap.SetupError, match=r"1\.0 GB free, but the installation needs 4\.3 GB"):
        bootstrap.prepare("serve", "")
    assert commands == []


def test_missing_compiler_and_headers(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    header = tmp_path / "Python.h"
    bootstrap.check_native_tools(lambda name: None, header, required=False)
    assert "apt-get install g++ python3-dev" in capsys.readouterr().err
    header.touch()
    with pytest.raises(bootstrap.SetupError, match=r"a C\+\+ compiler cannot be found; .*install g\+\+$"):
        bootstrap.check_native_tools(lambda name: None, header, required=True)
    bootstrap.check_native_tools(lambda name: "/usr/bin/g++" if name == "g++" else None, header, required=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("", False), ("false", False)])
def test_ci_is_what_the_environment_says(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("CI", value)
    assert bootstrap.in_ci() is expected


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "make room"),
        (
            "Retrying ... NewConnectionError('<x>: Failed to establish')\nERROR: No matching distribution",
            "PIP_INDEX_URL",
        ),
        ("Retrying ... [Errno -2] Name or service not known", "cannot be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0", "does not have it"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        ("something\nerror: odd thing\nbye", "error: odd thing"),
        ("", "no message"),
    ],
)
def test_complaints_become_remedies(bootstrap: ModuleType, text: str, remedy: str) -> None:
    assert remedy in bootstrap.diagnose(text)


def test_a_program_that_fails_is_explained(bootstrap: ModuleType) -> None:
    bootstrap.VENV.mkdir()
    code = "import sys; print('ConnectTimeout', file=sys.stderr); sys.exit(3)"
    with pytest.raises(bootstrap.SetupError, match=r"it broke: the package index does not answer.*setup\.log"):
        bootstrap.run([sys.executable, "-c", code], "it broke")
    assert "ConnectTimeout" in (bootstrap.VENV / "setup.log").read_text()


# ---------------------------------------------------------------- CUDA builds


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)", 526_600_000),
        ("  Using cached torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (1.1 GB)", 1_100_000_000),
        ("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)", 0),
        ("Processing /wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", 0),
        ("  Downloading torchvision-0.28.0-cp311-cp311-manylinux_2_28_x86_64.whl (8.0 MB)", 0),
    ],
)
def test_size_in_what_pip_says(bootstrap: ModuleType, line: str, size: int) -> None:
    assert bootstrap.size_in(line) == size


def test_pip_is_stopped_once_it_has_named_the_size(bootstrap: ModuleType) -> None:
    code = (
        "import time; print('Collecting torch'); "
        "print('  Downloading torch-2.13.0-x.whl (526.6 MB)', flush=True); time.sleep(60)"
    )
    assert bootstrap.announced_size([sys.executable, "-c", code]) == 526_600_000
    assert bootstrap.announced_size([sys.executable, "-c", "print('Processing ./torch.whl')"]) == 0


def test_a_pip_that_says_nothing_is_given_up(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_PROBE_TIMEOUT_S", 0.1)
    assert bootstrap.announced_size([sys.executable, "-c", "import time; time.sleep(60)"]) == 0


def test_cuda_build_without_gpu_names_size_and_remedy(
    bootstrap: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "announced_size", lambda command: 526_600_000)
    assert bootstrap.main(["serve"]) == 0
    text = capsys.readouterr().err
    assert "CUDA build (0.5 GB" in text and "TORCH_INDEX=" in text and bootstrap.INSTALL_PAGE in text


@pytest.mark.parametrize("gpu", [True, False])
def test_no_warning_where_none_is_due(
    bootstrap: ModuleType,
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: bool,
) -> None:
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
    monkeypatch.setattr(bootstrap, "announced_size", lambda command: 526_600_000 if gpu else 190_000_000)
    bootstrap.main(["serve"])
    assert "CUDA" not in capsys.readouterr().err


# ---------------------------------------------------------------- files


def test_key_follows_what_an_installation_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "bootstrap.py"))
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    keys = [module.setup_key("")]
    (tmp_path / "csrc" / "cpu" / "a.cpp").write_text("1")
    keys.append(module.setup_key(""))
    (tmp_path / "csrc" / "cpu" / "a.cpp").write_text("2")
    keys.append(module.setup_key(""))
    (tmp_path / "src" / "m.py").write_text("")
    keys.append(module.setup_key(""))
    keys.append(module.setup_key("https://example.org"))
    assert len(set(keys)) == 5
    (tmp_path / "src" / "m.py").write_text("changed = 1")
    assert module.setup_key("") == keys[3]


def test_make_help_lists_the_two_commands() -> None:
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    assert "make serve" in text and "make test" in text and "TORCH_INDEX" in text


def test_sizes_report_runs() -> None:
    done = subprocess.run(
        [sys.executable, "tools/sizes.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert "model_files" in done.stdout and "in all" in done.stdout


def test_ci_script_needs_no_terminal_and_is_executable() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=20)
    assert "make test" in script.read_text()
