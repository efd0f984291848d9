"""Make the checkout's ``.venv`` ready: ``python3 tools/bootstrap.py {serve,test}``.

Runs under the system's Python with the standard library alone. Owns the order (checks, environment, PyTorch, package)
and the stamp by which a second run does nothing. Whatever can go wrong on a fresh machine ends in one line that says
what to do; pip's own words are kept in ``.venv/setup.log``.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TORCH = "torch==2.13.0"
BUILD_TOOLS = ("scikit-build-core>=0.11", "nanobind>=2.4", "cmake>=3.26", "ninja>=1.11")
EXTRAS = {"serve": "", "test": "[test,dev]"}
INSTALL_PAGE = "https://pytorch.org/get-started/locally/"
FRESH_BYTES = 4 << 30
_PIP_TIMEOUT_S = 3600.0
_PROBE_TIMEOUT_S = 60.0
# A CPU build of PyTorch is smaller, a CUDA build larger.
_CUDA_WHEEL_BYTES = 400_000_000
_CUDA_LIBRARIES_BYTES = 2_500_000_000
# Downloaded and unpacked, wheels take about this many times their own size.
_UNPACK_FACTOR = 3.5


class SetupError(Exception):
    """Something that the user can put right; the text is one line with the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description="Prepare .venv for a make target.")
    parser.add_argument("purpose", choices=sorted(EXTRAS))
    parser.add_argument("--torch-index", default="", help="index URL of another PyTorch build")
    options = parser.parse_args(arguments)
    try:
        prepare(options.purpose, options.torch_index)
    except SetupError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(purpose: str, torch_index: str) -> None:
    """Bring ``.venv`` to the state that ``purpose`` needs; does nothing when it is there already."""
    key = setup_key(torch_index)
    stamp = VENV / f".ready-{purpose}"
    if is_ready(stamp, key):
        return
    check_python(sys.version_info[:2])
    check_venv_module()
    with locked():
        if is_ready(stamp, key):
            return
        is_fresh = not (VENV / "bin" / "python").exists()
        if is_fresh:
            check_disk(shutil.disk_usage(ROOT).free, FRESH_BYTES)
        check_native_tools(shutil.which, Path(sysconfig.get_path("include"), "Python.h"), required=in_ci())
        if is_fresh:
            say("creating .venv")
            run([sys.executable, "-m", "venv", str(VENV)], "the virtual environment could not be created")
        install_torch(torch_index)
        say("installing build tools")
        pip("install", "--quiet", *BUILD_TOOLS)
        say("building and installing headrace" + (" with what tests need" if purpose == "test" else ""))
        pip("install", "--no-build-isolation", "--editable", f"{ROOT}{EXTRAS[purpose]}")
        stamp.write_text(key)


def is_ready(stamp: Path, key: str) -> bool:
    """Whether the environment was made with these inputs."""
    return stamp.is_file() and stamp.read_text() == key


def setup_key(torch_index: str) -> str:
    """Hash of everything that an installation depends on.

    That is requirements, native sources, this program, and which modules exist: an editable installation sees changes
    within a module, but has a list of them.
    """
    modules = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py"))
    digest = hashlib.sha256("\n".join([torch_index, *modules]).encode())
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", Path(__file__)]
    files += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    for file in files:
        if file.is_file():
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@contextmanager
def locked() -> Iterator[None]:
    """Let one set-up at a time work on the environment."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this checkout")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ------------------------------------------------------------ checks


def check_python(version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old."""
    if version < (3, 11):
        raise SetupError(
            f"Python {'.'.join(map(str, version))} is too old; install 3.11 or newer and run make PYTHON=python3.11"
        )


def check_venv_module() -> None:
    """Debian splits the module off; without it ``python3 -m venv`` fails half-way."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError("this Python cannot make virtual environments; run: apt-get install python3-venv")


def check_disk(free: int, needed: int) -> None:
    """Refuse to begin what cannot end."""
    if free < needed:
        raise SetupError(
            f"the disk has {gigabytes(free)} free, but the installation needs {gigabytes(needed)}; make room first"
        )


def check_native_tools(which: Callable[[str], str | None], header: Path, required: bool) -> None:
    """Without a C++ compiler and Python's headers headrace works, slowly; tests must not pass that way."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    missing: list[tuple[str, str]] = []
    if not any(which(name) for name in names):
        missing.append(("a C++ compiler", "g++"))
    if not header.is_file():
        missing.append(("Python's headers", "python3-dev"))
    if not missing:
        return
    what = " and ".join(name for name, _ in missing)
    remedy = f"run: apt-get install {' '.join(package for _, package in missing)}"
    if required:
        raise SetupError(f"{what} cannot be found; {remedy}")
    say(f"{what} cannot be found, so the native CPU kernels are left out and headrace will be slow; {remedy}")


def in_ci() -> bool:
    """Whether a missing tool must fail."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


# ------------------------------------------------------------ PyTorch


def install_torch(torch_index: str) -> None:
    """Install PyTorch by its exact version, before anything could pull another build."""
    wanted = f"{TORCH} {torch_index}"
    marker = VENV / ".torch"
    if marker.is_file() and marker.read_text() == wanted and has_torch():
        return
    if not torch_index and has_torch():
        marker.write_text(wanted)
        return
    if not torch_index and not has_gpu():
        warn_of_cuda(announced_size([*pip_command(), "download", "--no-deps", TORCH]))
    index = ["--index-url", torch_index] if torch_index else []
    replace = ["--force-reinstall"] if torch_index and has_torch() else []
    say(f"installing {TORCH}")
    pip("install", *replace, *index, TORCH)
    marker.write_text(wanted)


def has_torch() -> bool:
    """Whether the environment has the wanted version, whatever its build."""
    code = f"import importlib.metadata as m; raise SystemExit(m.version('torch').split('+')[0] != '{TORCH[7:]}')"
    done = subprocess.run([str(VENV / "bin" / "python"), "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def announced_size(command: list[str]) -> int:
    """Bytes of the PyTorch wheel that pip is about to download, 0 for a local file or when it does not say.

    pip names the size when it begins a download; it is stopped there, so that nothing large has moved yet.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, "--dest", folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        deadline = threading.Timer(_PROBE_TIMEOUT_S, process.kill)
        deadline.start()
        try:
            assert process.stdout is not None
            return next((size for line in process.stdout if (size := size_in(line))), 0)
        finally:
            deadline.cancel()
            process.kill()


def size_in(line: str) -> int:
    """Size that a line of pip gives for the PyTorch wheel, or 0."""
    match = re.search(r"torch-\S+\.whl \((\d+(?:\.\d+)?) (kB|MB|GB)\)", line)
    return int(float(match[1]) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[match[2]]) if match else 0


def warn_of_cuda(num_bytes: int) -> None:
    """Say the size of a CUDA build and how to get a smaller one, before it is downloaded."""
    if num_bytes < _CUDA_WHEEL_BYTES:
        return
    say(
        f"the package index offers {TORCH} as a CUDA build ({gigabytes(num_bytes)}, and about "
        f"{gigabytes(_CUDA_LIBRARIES_BYTES)} of CUDA libraries with it), but this machine has no GPU; to install the "
        "small CPU build instead, stop now (Ctrl-C) and run make with TORCH_INDEX=<index URL of the CPU build>, which "
        f"{INSTALL_PAGE} names"
    )
    check_disk(shutil.disk_usage(ROOT).free, int(_UNPACK_FACTOR * (num_bytes + _CUDA_LIBRARIES_BYTES)))


# ------------------------------------------------------------ running things


def pip_command() -> list[str]:
    """pip of the environment; patient with slow links, not with missing ones."""
    return [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2"]


def pip(*arguments: str) -> None:
    """Run pip with its progress shown; its errors become one line."""
    run([*pip_command(), *arguments], f"pip {arguments[0]} failed")


def run(command: list[str], problem: str) -> None:
    """Run a program to its end.

    Raises:
        SetupError: it failed; the remedy is guessed from what it wrote.
    """
    env = {**os.environ, "HEADRACE_REQUIRE_NATIVE": "1"} if in_ci() else None
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=_PIP_TIMEOUT_S, env=env
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"{problem}: it did not end within {_PIP_TIMEOUT_S / 60:.0f} minutes") from None
    log = VENV / "setup.log"
    if log.parent.is_dir():
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stderr}\n")
    if done.returncode != 0:
        raise SetupError(f"{problem}: {diagnose(done.stderr)} (details in .venv/setup.log)")


_REMEDIES = (
    ("No space left on device", "the disk is full; make room and run it again"),
    ("Name or service not known", "the package index cannot be reached; check the network or set PIP_INDEX_URL"),
    (
        "Temporary failure in name resolution",
        "the package index cannot be reached; check the network or set PIP_INDEX_URL",
    ),
    ("NewConnectionError", "the package index cannot be reached; check the network or set PIP_INDEX_URL"),
    ("ConnectTimeout", "the package index does not answer; check the network or set PIP_INDEX_URL"),
    ("Read timed out", "the package index stopped answering; run it again"),
    ("CERTIFICATE_VERIFY_FAILED", "the index's certificate is not trusted; set PIP_CERT to your certificate bundle"),
    ("ProxyError", "the proxy refuses; check HTTPS_PROXY"),
    ("No matching distribution", "the package index does not have it for this Python and machine; set PIP_INDEX_URL"),
    ("CMake", "the native kernels do not build; look at the compiler's first error"),
)


def diagnose(text: str) -> str:
    """The remedy for what a program complained about, or its last complaint."""
    for sign, remedy in _REMEDIES:
        if sign in text:
            return remedy
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
    return errors[-1]


def gigabytes(num_bytes: float) -> str:
    """A size for people."""
    return f"{num_bytes / 1e9:.1f} GB"


def say(text: str) -> None:
    """One line of progress."""
    print(f"headrace: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
