"""A subscriber that knows only the events rebuilds the exact contents of the cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from headrace.base.errors import ConfigError
from headrace.core.kv_publisher import KVEventsConfig, parse_kv_events_config
from headrace.messages.requests import ResetPrefixCache
from headrace.testing.requests import make_request
from tests.observability.watched_core import WatchedCore

TIMEOUT_MS = 5000
FIELDS = {
    "BlockStored": [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}


class Subscriber:
    """Follows one engine; ``blocks`` maps a hash to its tokens."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.RCVTIMEO = TIMEOUT_MS
        self.socket.subscribe(b"kv@")
        self.socket.connect(f"ipc://{folder}/events")
        self.replay = context.socket(zmq.DEALER)
        self.replay.RCVTIMEO = TIMEOUT_MS
        self.replay.connect(f"ipc://{folder}/replay")
        self.blocks: dict[Any, list[int]] = {}
        self.stored: list[dict[str, Any]] = []
        self.next_number = 0

    def catch_up(self) -> None:
        """Take everything from the replay socket."""
        self.replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            _, number, payload = self.replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                assert not payload
                return
            self.take(number, payload)

    def follow(self) -> None:
        topic, number, payload = self.socket.recv_multipart()
        assert topic == b"kv@me@model"
        if int.from_bytes(number, "big") >= self.next_number:
            self.take(number, payload)

    def take(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next_number, "a gap"
        self.next_number += 1
        seconds, events = msgspec.msgpack.decode(payload)
        assert isinstance(seconds, float)
        for event in events:
            self.apply(event)

    def apply(self, event: Any) -> None:
        if isinstance(event, list):
            event = {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=True))}
        kind = event.pop("type")
        assert list(event) == FIELDS[kind]
        if kind == "AllBlocksCleared":
            self.blocks.clear()
        elif kind == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                del self.blocks[block_hash]
        else:
            self.stored.append(event)
            size = event["block_size"]
            for index, block_hash in enumerate(event["block_hashes"]):
                self.blocks[block_hash] = event["token_ids"][index * size : (index + 1) * size]


Subscribe = Callable[[], Subscriber]


@pytest.fixture
def subscribe(tmp_path: Path) -> Iterator[Subscribe]:
    """Makes subscribers and closes their sockets."""
    context: zmq.Context[Any] = zmq.Context()
    made: list[Subscriber] = []

    def make() -> Subscriber:
        made.append(Subscriber(context, tmp_path))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.socket.close(0)
        subscriber.replay.close(0)
    context.term()


def start(folder: Path, **changes: Any) -> WatchedCore:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv@me@model",
        **changes,
    }
    return WatchedCore(kv_events_config=json.dumps(config), num_kv_blocks=30, max_num_seqs=4, max_model_len=100)


def work(core: WatchedCore, count: int) -> None:
    random = Random(count)
    for number in range(count):
        start_token = 131 * random.randrange(4)
        prompt = [10 + (start_token + i) % 900 for i in range(random.randint(1, 60))]
        core.add(make_request(f"{count} {number}", prompt, random.randint(1, 12)))
        core.step(3)
    core.run()


def number_of(block_hash: bytes, how: str) -> Any:
    return block_hash if how == "bytes" else int.from_bytes(block_hash[-8:], "big", signed=how == "int64")


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("hashes", ["uint64", "int64", "bytes"])
def test_the_cache_is_rebuilt(tmp_path: Path, subscribe: Subscribe, encoding: str, hashes: str) -> None:
    core = start(tmp_path, encoding=encoding, hashes=hashes)
    work(core, 10)
    late = subscribe()
    late.catch_up()
    work(core, 5)
    assert core.core.perform(ResetPrefixCache())
    work(core, 6)
    pool = core.core.scheduler.kv.pool
    expected = {number_of(h, hashes) for h in pool.findable(0)}
    # The last batches may still be on their way to the publisher's thread.
    deadline = time.monotonic() + 5
    while late.blocks.keys() != expected and time.monotonic() < deadline:
        late.catch_up()
    assert late.blocks.keys() == expected
    assert pool.num_evicted > 0
    core.core.shutdown()


def test_events_are_pushed_as_they_happen(tmp_path: Path, subscribe: Subscribe) -> None:
    core = start(tmp_path)
    subscriber = subscribe()
    work(core, 2)
    subscriber.catch_up()
    # The subscription is through when the replay has been answered and a first batch arrives.
    caught = subscriber.next_number
    for number in range(3):
        core.run(make_request(f"x{number}", [10 + 30 * number + i for i in range(20)], 1))
    while subscriber.next_number < caught + 3:
        subscriber.follow()
    core.core.shutdown()


def test_salts_and_adapters_are_told(tmp_path: Path, subscribe: Subscribe) -> None:
    core = start(tmp_path)
    core.run(make_request("a", 12, 1, cache_salt="s"), make_request("b", 12, 1, lora_name="poet"))
    subscriber = subscribe()
    subscriber.catch_up()
    salted, adapted = subscriber.stored
    assert salted["extra_keys"] == [["s"], None, None] and salted["lora_name"] is None
    assert adapted["lora_name"] == "poet" and adapted["extra_keys"] is None
    core.core.shutdown()


def test_replay_is_bounded(tmp_path: Path, subscribe: Subscribe) -> None:
    core = start(tmp_path, buffer_steps=3)
    work(core, 8)
    subscriber = subscribe()
    subscriber.replay.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers = []
    while (number := int.from_bytes(subscriber.replay.recv_multipart()[1], "big", signed=True)) >= 0:
        numbers.append(number)
    assert len(numbers) == 3 and numbers == list(range(numbers[0], numbers[0] + 3))
    core.core.shutdown()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "kv-events-config"),
        ('{"endpoit": "x"}', "endpoit"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ("[]", "object"),
    ],
)
def test_bad_configurations_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_kv_events_config(text)


def test_a_taken_address_is_named(tmp_path: Path) -> None:
    core = start(tmp_path)
    with pytest.raises(ConfigError, match="cannot bind ipc://"):
        start(tmp_path, replay_endpoint="", endpoint=f"ipc://{tmp_path}/none/events")
    core.core.shutdown()


def test_the_replay_port_follows_the_endpoint() -> None:
    assert not parse_kv_events_config(None).active
    assert KVEventsConfig(endpoint="tcp://*:5557").replay_address == "tcp://*:5558"
    assert KVEventsConfig(endpoint="ipc:///a").replay_address == ""
    assert KVEventsConfig(replay_endpoint="").replay_address == ""
