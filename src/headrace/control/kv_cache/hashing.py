"""Content hashes of full blocks: a SHA-256 chain over (parent, token ids, extra keys).

The chain starts from a root that holds everything which changes the contents of KV beside the tokens: typed,
length-framed extra keys, so that a salt can never be mistaken for an adapter. Hashes depend on nothing else: the same
in every process and on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

_DOMAIN = b"headrace kv block chain 1"
_TOKEN_BYTES = 4
_SWAP = sys.byteorder == "big"
assert array("I").itemsize == _TOKEN_BYTES


class ExtraKey(NamedTuple):
    """One thing beside the tokens that changes KV: its type (``lora``, ``salt``) and its identity."""

    kind: str
    value: str


def _framed(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def make_root(block_size: int, extra_keys: Sequence[ExtraKey] = ()) -> bytes:
    """The parent of a chain's first block."""
    digest = sha256(_DOMAIN)
    digest.update(block_size.to_bytes(8, "little"))
    digest.update(len(extra_keys).to_bytes(8, "little"))
    for key in extra_keys:
        digest.update(_framed(key.kind))
        digest.update(_framed(key.value))
    return digest.digest()


class HashChain:
    """The block hashes of one request, extended as its tokens become certain.

    Args:
        block_size: tokens of a block.
        extra_keys: of the request.
        owner: whose request it is; part of no hash.
    """

    __slots__ = ("block_size", "extra_keys", "hashes", "owner", "root")

    def __init__(self, block_size: int, extra_keys: Sequence[ExtraKey] = (), owner: str | None = None) -> None:
        self.block_size = block_size
        self.owner = owner
        self.extra_keys = tuple(extra_keys)
        self.root = make_root(block_size, self.extra_keys)
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Hash every full block among the first ``num_tokens`` of ``token_ids`` and return all hashes so far.

        ``token_ids`` must be certain and must begin with the tokens hashed before.
        """
        hashes = self.hashes
        first, end = len(hashes), num_tokens // self.block_size
        if first >= end:
            return hashes
        tokens = array("I", token_ids[first * self.block_size : end * self.block_size])
        if _SWAP:
            tokens.byteswap()
        data = tokens.tobytes()
        width = self.block_size * _TOKEN_BYTES
        parent = hashes[-1] if hashes else self.root
        append = hashes.append
        for offset in range(0, len(data), width):
            parent = sha256(parent + data[offset : offset + width]).digest()
            append(parent)
        return hashes
