"""How long blocks stay findable and how they are used meanwhile, from a sample of them.

Owns the times of the sampled blocks that are findable. A block is sampled by its hash, so that the choice needs no
random numbers and the same text is always in the sample or never. Everything is counted when a block is evicted: what
stays findable has no lifetime so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace.observability.buckets import RESIDENCY_S, Buckets

_KEPT_USES = 4
_HASH_RANGE = 1 << 32


class BlockResidency:
    """See the module.

    Args:
        share: of the blocks that are sampled, 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._limit = int(share * _HASH_RANGE)
        self._uses: dict[bytes, tuple[float, deque[float]]] = {}
        self.lifetime = Buckets(RESIDENCY_S)
        self.idle_before_evict = Buckets(RESIDENCY_S)
        self.reuse_gap = Buckets(RESIDENCY_S)

    @property
    def active(self) -> bool:
        """Whether anything is sampled."""
        return self._limit > 0

    def stored(self, hashes: Iterable[bytes], now: float) -> None:
        """Blocks became findable."""
        for block_hash in hashes:
            if self._is_sampled(block_hash):
                self._uses[block_hash] = (now, deque([now], maxlen=_KEPT_USES))

    def used(self, hashes: Iterable[bytes], now: float) -> None:
        """A request took these blocks from the cache."""
        for block_hash in hashes:
            known = self._uses.get(block_hash)
            if known is not None:
                known[1].append(now)

    def removed(self, block_hash: bytes, now: float) -> None:
        """A block was evicted."""
        known = self._uses.pop(block_hash, None)
        if known is None:
            return
        born, uses = known
        self.lifetime.observe(now - born)
        self.idle_before_evict.observe(now - uses[-1])
        for earlier, later in zip(uses, list(uses)[1:], strict=False):
            self.reuse_gap.observe(later - earlier)

    def cleared(self, now: float) -> None:
        """Every block was evicted."""
        for block_hash in list(self._uses):
            self.removed(block_hash, now)

    def dump(self) -> dict[str, tuple[list[int], float]]:
        """The histograms by name; nothing while nothing is sampled."""
        if not self.active:
            return {}
        return {
            "kv_block_lifetime": self.lifetime.dump(),
            "kv_block_idle_before_evict": self.idle_before_evict.dump(),
            "kv_block_reuse_gap": self.reuse_gap.dump(),
        }

    def _is_sampled(self, block_hash: bytes) -> bool:
        return int.from_bytes(block_hash[:4], "big") < self._limit
