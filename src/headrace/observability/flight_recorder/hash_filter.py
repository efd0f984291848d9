"""A set of hashes that only grows, in constant memory: it may claim too much, never too little."""

from __future__ import annotations

_BITS = 1 << 22


class HashFilter:
    """Two bits per hash. Hashes are uniform (SHA-256), so their own bytes say which."""

    def __init__(self) -> None:
        self._bits = bytearray(_BITS // 8)

    def add(self, block_hash: bytes) -> None:
        """Put a hash in."""
        for place in _places(block_hash):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, block_hash: bytes) -> bool:
        return all(self._bits[place >> 3] & 1 << (place & 7) for place in _places(block_hash))


def _places(block_hash: bytes) -> tuple[int, int]:
    return int.from_bytes(block_hash[:4], "little") % _BITS, int.from_bytes(block_hash[4:8], "little") % _BITS
