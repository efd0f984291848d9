"""Publishes KV cache events over ZeroMQ, for routers that send a request to where its prefix is.

Owns the publishing thread and its sockets. The core hands over one batch per step and never waits: the way to the
thread is bounded, and a batch that does not fit is lost with its number, so that consumers see the gap. Numbers
start at 0 with the process. Whoever missed something asks the replay socket for the batches from a number on.

Frames: topic, number (8 bytes, big-endian), msgpack of ``[seconds, [events]]``. The fields are those that llm-d,
AIBrix and Dynamo read; ``encoding`` chooses events as maps with a ``type`` or as positional arrays.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Literal

import msgspec
import zmq

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.base.logging import get_logger
from headrace.control.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

logger = get_logger(__name__)

_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_CLOSE_S = 5.0
_MAX_BATCH = 4096


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of ``--kv-events-config``.

    ``replay_endpoint`` is by default the port after that of ``endpoint``; an empty one switches replays off. ``hashes``
    says how a block hash is written: its last 8 bytes as a number, or all of it. ``medium`` names this cache's tier.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: Literal["map", "array"] = "map"
    hashes: Literal["uint64", "int64", "bytes"] = "uint64"
    medium: str = "GPU"

    @property
    def active(self) -> bool:
        """Whether anything is to be published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def replay_address(self) -> str:
        """Where replays are served; empty for nowhere."""
        if self.replay_endpoint is not None:
            return self.replay_endpoint
        base, _, port = self.endpoint.rpartition(":")
        return f"{base}:{int(port) + 1}" if self.endpoint.startswith("tcp://") and port.isdigit() else ""


def parse_kv_events_config(text: str | None) -> KVEventsConfig:
    """The configuration in ``text``; raises `ConfigError` that names the field."""
    if text is None:
        return KVEventsConfig()
    try:
        config = msgspec.json.decode(text.encode(), type=KVEventsConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--kv-events-config: {error}") from None
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--kv-events-config: {name} must be at least 1")
    return config


class EventEncoder:
    """Events to plain data in one of the two encodings."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._config = config
        self._as_map = config.encoding == "map"

    def encode(self, event: KVEvent) -> Any:
        """One event."""
        match event:
            case BlockStored():
                name, fields = "BlockStored", self._stored(event)
            case BlockRemoved():
                fields = {"block_hashes": [self._hash(event.block_hash)], "medium": self._config.medium}
                name, fields = "BlockRemoved", fields | {"group_idx": event.group_id}
            case AllBlocksCleared():
                name, fields = "AllBlocksCleared", {}
        return {"type": name, **fields} if self._as_map else [name, *fields.values()]

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        keys = {key.kind: key.value for key in event.extra_keys}
        salted = "salt" in keys and event.parent_hash is None
        extra = [[keys["salt"]], *[None] * (len(event.block_hashes) - 1)] if salted else None
        return {
            "block_hashes": [self._hash(block_hash) for block_hash in event.block_hashes],
            "parent_block_hash": None if event.parent_hash is None else self._hash(event.parent_hash),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": self._config.medium,
            "lora_name": keys.get("lora"),
            "extra_keys": extra,
            "group_idx": event.group_id,
        }

    def _hash(self, block_hash: bytes) -> int | bytes:
        if self._config.hashes == "bytes":
            return block_hash
        return int.from_bytes(block_hash[-_NUMBER_BYTES:], "big", signed=self._config.hashes == "int64")


class KVEventPublisher:
    """See the module. `emit` and `flush` belong to the core's thread.

    Args:
        config: active.
        clock: dates the batches.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(self, config: KVEventsConfig, clock: Clock) -> None:
        self._clock = clock
        self._encoder = EventEncoder(config)
        self._pack = msgspec.msgpack.Encoder().encode
        self._events: list[Any] = []
        self._number = 0
        self.num_lost = 0
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._public = self._bind(zmq.PUB, config.endpoint, config.hwm)
            address = config.replay_address
            self._replay = self._bind(zmq.ROUTER, address, config.hwm) if address else None
            self._inner = self._bind(zmq.PULL, "inproc://batches", config.max_queue_size)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._outer = self._context.socket(zmq.PUSH)
        self._outer.set_hwm(config.max_queue_size)
        self._outer.linger = 0
        self._outer.connect("inproc://batches")
        self._thread = threading.Thread(target=self._serve, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, address: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = 0
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: cannot bind {address}: {error.strerror}") from None
        return socket

    # The core's thread

    def emit(self, event: KVEvent) -> None:
        """Take one event for the batch of this step."""
        self._events.append(self._encoder.encode(event))
        if len(self._events) >= _MAX_BATCH:
            self.flush()

    def flush(self) -> None:
        """Send what was taken as one batch."""
        if not self._events:
            return
        events, self._events = self._events, []
        number, self._number = self._number, self._number + 1
        payload = self._pack([self._clock.wall(), events])
        try:
            self._outer.send_multipart([number.to_bytes(_NUMBER_BYTES, "big"), payload], zmq.NOBLOCK)
        except zmq.Again:
            self.num_lost += 1
            if self.num_lost & (self.num_lost - 1) == 0:
                logger.warning("%d batches of KV events were lost: the publisher cannot keep up", self.num_lost)

    def close(self) -> None:
        """Publish what is under way and end. Idempotent."""
        if self._outer.closed:
            return
        self.flush()
        self._outer.send_multipart([b""])
        self._thread.join(_CLOSE_S)
        self._outer.close()
        if not self._thread.is_alive():
            self._context.term()

    # The publisher's thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inner, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        going = True
        while going:
            ready = dict(poller.poll())
            if self._inner in ready:
                going = self._publish()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        for socket in (self._public, self._replay, self._inner):
            if socket is not None:
                socket.close()

    def _publish(self) -> bool:
        number, *rest = self._inner.recv_multipart()
        if not rest:
            return False
        self._kept.append((int.from_bytes(number, "big"), rest[0]))
        self._public.send_multipart([self._topic, number, rest[0]])
        return True

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the kept batches from the number that was asked for, and the end mark. Strange questions are ignored."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
            return
        asker, first = frames[0], int.from_bytes(frames[2], "big")
        try:
            for number, payload in self._kept:
                if number >= first:
                    replay.send_multipart([asker, b"", number.to_bytes(_NUMBER_BYTES, "big"), payload], zmq.NOBLOCK)
            replay.send_multipart([asker, b"", _END, b""], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a consumer of KV events asked for more than it reads")
