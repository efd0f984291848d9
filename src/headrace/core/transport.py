"""The wire between a frontend and a core process: two ``ipc://`` sockets in a private folder, msgpack only.

The client binds both sockets before it starts the core, so nobody races for them, and its first message is the
`CoreStart`; the core's first is `CoreReady` or `CoreFailed`. When the client has that answer both connections stand,
and it removes the folder: nothing is left on disk that a crash could leave behind.

Both ends keep bounded queues (high-water marks) and do not linger, except for a core's last words.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.config.sections import EngineConfig
from headrace.messages.codec import Codec
from headrace.messages.outputs import FromCore
from headrace.messages.requests import ToCore

HIGH_WATER = 1024
LAST_WORDS_MS = 1000


class CoreStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag="start"):
    """What a core process needs to build itself.

    ``executor`` is a dotted path ``package.module:factory``; the factory is called as
    ``factory(config, progress, **options)``. ``progress_name`` names the shared progress word. ``spawned_at`` is when
    the process was started, in `Clock.monotonic` seconds.
    """

    config: EngineConfig
    executor: str
    options: dict[str, Any]
    progress_name: str
    spawned_at: float


def to_core_codec() -> Codec[ToCore | CoreStart]:
    """Codec of what travels to the core."""
    return Codec(ToCore | CoreStart)


def from_core_codec() -> Codec[FromCore]:
    """Codec of what comes back."""
    return Codec(FromCore)


def input_address(folder: str) -> str:
    """Where the client's messages go."""
    return f"ipc://{folder}/in"


def output_address(folder: str) -> str:
    """Where the core's messages go."""
    return f"ipc://{folder}/out"
