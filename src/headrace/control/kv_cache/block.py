"""One KV block as the control plane sees it: an id with counted owners. Contents live on the device."""

from __future__ import annotations

NULL_BLOCK_ID = 0


class KVBlock:
    """A block of the pool.

    ``ref_count`` counts the owners (requests, fences, leases); at 0 the block stands in the free queue, hashed or not.
    ``block_hash`` with ``group_id`` is the key under which the block is findable, or ``None``. The two links belong to
    the free queue.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.group_id = 0
        self.prev_free: KVBlock | None = None
        self.next_free: KVBlock | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else "-"
        return f"KVBlock({self.block_id}, refs={self.ref_count}, hash={digest})"
