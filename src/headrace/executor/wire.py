"""What travels between an executor and a worker process: length-prefixed msgpack over a socket pair, both ways.

Every call is answered by exactly one reply, in the order of the calls.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Literal

import msgspec

from headrace.config.sections import EngineConfig
from headrace.executor.base import ExecutorReady
from headrace.messages.codec import Codec
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import GraphSummary
from headrace.messages.requests import AnyControl
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

_LENGTH = struct.Struct("<Q")
ErrorKind = Literal["config", "model_file", "request", "step", "dead"]


class Start(msgspec.Struct, frozen=True, tag=True):
    """Join the group whose ranks meet in the file ``rendezvous``, and load. Answered by `ExecutorReady` in `Ready`."""

    config: EngineConfig
    rank: int
    size: int
    rendezvous: str
    progress_name: str | None


class InitializeKV(msgspec.Struct, frozen=True, tag=True):
    """Allocate blocks and capture graphs. Answered by `Initialized`."""

    plan: KVCacheConfig


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Run a forward."""

    step: SchedulerOutput


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Sample the last forward."""

    grammar: GrammarOutput | None


class Control(msgspec.Struct, frozen=True, tag=True):
    """Apply a verb."""

    request: AnyControl


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Loaded."""

    ready: ExecutorReady


class Initialized(msgspec.Struct, frozen=True, tag=True):
    """Ready for steps."""

    graphs: GraphSummary


class Done(msgspec.Struct, frozen=True, tag=True):
    """A call that went well. ``output`` is set by rank 0 only; other ranks know it too but need not send it."""

    output: ModelRunnerOutput | None = None
    value: Any = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A call that raised; the worker goes on."""

    kind: ErrorKind
    message: str


Call = Start | InitializeKV | Execute | Sample | Control
Reply = Ready | Initialized | Done | Failed


def call_codec() -> Codec[Call]:
    """Codec of calls."""
    return Codec(Call)


def reply_codec() -> Codec[Reply]:
    """Codec of replies."""
    return Codec(Reply)


def send_frame(connection: socket.socket, data: bytes) -> None:
    """Send one message."""
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(connection: socket.socket) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side has gone.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        size = connection.recv_into(view[got:])
        if size == 0:
            raise EOFError("the other side has closed the connection")
        got += size
    return bytes(data)
