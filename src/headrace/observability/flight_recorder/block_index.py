"""Remembers the KV blocks that were findable, to say why a prefix missed.

Owns a bounded index of block contents by hash: where each stands in its chain, which tokens it holds, and whether it
was evicted, in which step. It learns from the cache's own events and never touches the cache. What leaves the index
leaves a trace in a filter, so that "never seen" is only said of what was certainly never here.

What belongs to another salt or owner is not compared with, unless the operator allows it: to its prober it was never
seen. A block belongs to everybody who computed it or found it in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from headrace.observability.flight_recorder.hash_filter import HashFilter

DEFAULT_CAPACITY = 16_384
_MAX_COMPARED = 64
_SALT = "salt"
_LORA = "lora"
ChainKey = tuple[tuple[str, str], ...]
Owner = str | None


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a block was not there. ``token`` is a position in the prompt; ``step`` is when the block went."""

    reason: str
    step: int | None = None
    token: int | None = None
    other: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without what is unknown."""
        values = {"reason": self.reason, "step": self.step, "token": self.token, "other": self.other}
        return {name: value for name, value in values.items() if value is not None}


class _Block:
    """What is known of one block's contents. ``gone_at`` is the step that removed it, -1 while it is findable."""

    __slots__ = ("extra_keys", "gone_at", "owners", "parent", "removed_by", "tokens")

    def __init__(self, parent: bytes | None, tokens: tuple[int, ...], extra_keys: ChainKey, owner: Owner) -> None:
        self.parent = parent
        self.tokens = tokens
        self.extra_keys = extra_keys
        self.owners: frozenset[Owner] = _owner_set(owner)
        self.gone_at = -1
        self.removed_by = ""


class BlockIndex:
    """See the module.

    Args:
        capacity: most blocks remembered.
        across_salts: whether misses may be explained by blocks of another salt or owner.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, *, across_salts: bool = False) -> None:
        self._capacity = capacity
        self._across_salts = across_salts
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[Any, dict[bytes, None]] = {}
        self._by_tokens: dict[tuple[int, ...], dict[bytes, None]] = {}
        self._left = HashFilter()

    def __len__(self) -> int:
        return len(self._blocks)

    # What the cache says

    def stored(
        self,
        hashes: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        block_size: int,
        extra_keys: ChainKey,
        owner: Owner = None,
    ) -> None:
        """Blocks became findable, in chain order."""
        for number, block_hash in enumerate(hashes):
            known = self._blocks.get(block_hash)
            if known is not None:
                known.gone_at = -1
                known.owners |= _owner_set(owner)
            else:
                start = number * block_size
                self._add(block_hash, _Block(parent, tuple(token_ids[start : start + block_size]), extra_keys, owner))
            parent = block_hash

    def seen(self, hashes: Sequence[bytes], owner: Owner) -> None:
        """An owner found blocks in the cache: from now on they are its own too."""
        own = _owner_set(owner)
        for block_hash in hashes:
            known = self._blocks.get(block_hash)
            if known is not None and owner not in known.owners:
                known.owners |= own

    def removed(self, block_hash: bytes, step: int) -> None:
        """A block was evicted for the sake of a step."""
        known = self._blocks.get(block_hash)
        if known is not None:
            known.gone_at = step
            known.removed_by = "evicted"

    def cleared(self, step: int) -> None:
        """The whole cache was emptied."""
        for block in self._blocks.values():
            if block.gone_at < 0:
                block.gone_at = step
                block.removed_by = "cleared"

    def _add(self, block_hash: bytes, block: _Block) -> None:
        if len(self._blocks) >= self._capacity:
            self._drop_oldest()
        self._blocks[block_hash] = block
        self._children.setdefault(_place(block), {})[block_hash] = None
        self._by_tokens.setdefault(block.tokens, {})[block_hash] = None

    def _drop_oldest(self) -> None:
        block_hash = next(iter(self._blocks))
        block = self._blocks.pop(block_hash)
        for owner in block.owners:
            self._left.add(_owned(block_hash, owner))
        for table, key in ((self._children, _place(block)), (self._by_tokens, block.tokens)):
            peers = table[key]
            del peers[block_hash]
            if not peers:
                del table[key]

    # Why a block missed

    def explain(
        self,
        missed: bytes,
        parents: Sequence[bytes],
        prompt: Sequence[int],
        block_size: int,
        extra_keys: ChainKey,
        owner: Owner = None,
    ) -> Miss:
        """Why the block ``missed`` was not findable.

        Args:
            missed: its hash.
            parents: hashes of the blocks before it in its chain.
            prompt: token ids of the whole prompt.
            block_size: tokens of a block.
            extra_keys: of the chain.
            owner: who asks.
        """
        known = self._blocks.get(missed)
        if known is not None and known.gone_at >= 0 and self._shows(known, owner):
            return Miss(known.removed_by, step=known.gone_at)
        if _owned(missed, owner) in self._left:
            return Miss("left_index")
        index = len(parents)
        start = index * block_size
        tokens = tuple(prompt[start : start + block_size])
        twin = self._find_twin(tokens, parents, prompt, block_size, extra_keys, owner)
        if twin is not None:
            return twin
        shared = self._longest_shared(parents[-1] if parents else None, tokens, extra_keys, owner)
        if shared is None or (shared == 0 and index == 0):
            return Miss("never_seen")
        return Miss("text_differs", token=start + shared)

    def _shows(self, block: _Block, owner: Owner) -> bool:
        return self._across_salts or owner in block.owners

    def _find_twin(
        self,
        tokens: tuple[int, ...],
        parents: Sequence[bytes],
        prompt: Sequence[int],
        size: int,
        keys: ChainKey,
        owner: Owner,
    ) -> Miss | None:
        """The same text under other keys: another adapter, other media."""
        for block_hash in list(self._by_tokens.get(tokens, ()))[-_MAX_COMPARED:]:
            block = self._blocks[block_hash]
            differing = _kinds(keys) ^ _kinds(block.extra_keys) | _changed(keys, block.extra_keys)
            if not differing or (_SALT in differing and not self._across_salts):
                continue
            if not self._shows(block, owner) or not self._same_chain(block, len(parents), prompt, size):
                continue
            if _SALT in differing:
                return Miss("different_salt")
            if _LORA in differing:
                return Miss("different_adapter", other=dict(block.extra_keys).get(_LORA, "the base model"))
            return Miss("different_media")
        return None

    def _same_chain(self, block: _Block | None, index: int, prompt: Sequence[int], size: int) -> bool:
        """Whether a block ends a chain of ``index + 1`` blocks that spell the prompt."""
        while block is not None and index >= 0:
            if block.tokens != tuple(prompt[index * size : (index + 1) * size]):
                return False
            if block.parent is None:
                return index == 0
            block = self._blocks.get(block.parent)
            index -= 1
        return False

    def _longest_shared(
        self, parent: bytes | None, tokens: tuple[int, ...], keys: ChainKey, owner: Owner
    ) -> int | None:
        """Most leading tokens shared with a block that stood in this place; ``None`` when none ever did."""
        latest = list(self._children.get(keys if parent is None else parent, ()))[-_MAX_COMPARED:]
        peers = [block for block in (self._blocks[h] for h in latest) if self._shows(block, owner)]
        return max((_count_shared(block.tokens, tokens) for block in peers), default=None)


def _place(block: _Block) -> Any:
    """What the blocks that can follow each other in one place have in common: the parent, or the root's keys."""
    return block.extra_keys if block.parent is None else block.parent


def _kinds(keys: ChainKey) -> set[str]:
    return {kind for kind, _ in keys}


def _changed(ours: ChainKey, theirs: ChainKey) -> set[str]:
    mine = dict(ours)
    return {kind for kind, value in theirs if kind in mine and mine[kind] != value}


def _count_shared(known: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    count = 0
    for ours, theirs in zip(tokens, known, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


@lru_cache(1024)
def _owner_set(owner: Owner) -> frozenset[Owner]:
    """One set per owner, however many blocks it has."""
    return frozenset((owner,))


def _owned(block_hash: bytes, owner: Owner) -> bytes:
    """The block as this owner's: a hash of its own per owner."""
    return block_hash if owner is None else sha256(block_hash + owner.encode()).digest()
