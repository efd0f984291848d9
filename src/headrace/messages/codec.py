"""msgpack encoding of everything that crosses a process border; nothing is ever pickled."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes values of a type or tagged union and decodes them with validation.

    Args:
        type_: the type, or a union of tagged structs.

    Raises:
        msgspec.ValidationError: decoding something that is not a ``type_``.
    """

    def __init__(self, type_: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(type_)

    def encode(self, value: T) -> bytes:
        """Return the msgpack bytes."""
        return self._encoder.encode(value)

    def decode(self, data: bytes | memoryview) -> T:
        """Return the value."""
        return self._decoder.decode(data)
