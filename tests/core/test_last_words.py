"""What is said of a death names the root cause and the remedy."""

from __future__ import annotations

import signal

import pytest

from headrace.base.errors import EngineDeadError, ModelFileError
from headrace.base.last_words import describe_cause, describe_exit


def caused_by(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError("a step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (caused_by(MemoryError()), ["out of memory", "--kv-cache-memory", "MemoryError"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 99"), ["out of memory", "--kv-cache-memory", "99"]),
        (FileNotFoundError(2, "No such file", "/m/shard"), ["a file", "put it right", "No such file", "/m/shard"]),
        (caused_by(caused_by(ValueError("x"))), ["fault inside", "restart", "ValueError: x"]),
        (ValueError(), ["ValueError: no message"]),
        (ModelFileError("m.gguf: tensor a is missing"), ["m.gguf: tensor a is missing"]),
    ],
)
def test_causes(error: BaseException, words: list[str]) -> None:
    said = describe_cause(error)
    assert all(word in said for word in words), said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, ["SIGKILL", "memory is short", "--kv-cache-memory"]),
        (-signal.SIGSEGV, ["crashed with SIGSEGV", "restart"]),
        (-signal.SIGTERM, ["SIGTERM", "from outside", "restart"]),
        (3, ["exited with code 3", "restart"]),
    ],
)
def test_exits(code: int, words: list[str]) -> None:
    assert all(word in describe_exit(code) for word in words)
