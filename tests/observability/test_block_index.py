"""The index of blocks: what it says of a miss, and that it stays small."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from headrace.observability.flight_recorder.block_index import BlockIndex, ChainKey
from headrace.observability.flight_recorder.hash_filter import HashFilter

SIZE = 4


def chain(tokens: list[int], keys: ChainKey = ()) -> list[bytes]:
    """Hashes of the full blocks of a text."""
    parent, hashes = repr(keys).encode(), []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = sha256(parent + repr(tokens[start : start + SIZE]).encode()).digest()
        hashes.append(parent)
    return hashes


def store(index: BlockIndex, tokens: list[int], keys: ChainKey = ()) -> list[bytes]:
    hashes = chain(tokens, keys)
    index.stored(hashes, None, tokens, SIZE, keys)
    return hashes


def why(index: BlockIndex, tokens: list[int], place: int, keys: ChainKey = ()) -> dict[str, object]:
    hashes = chain(tokens, keys)
    return index.explain(hashes[place], hashes[:place], tokens, SIZE, keys).as_dict()


TEXT = list(range(100, 116))


def test_other_media_under_the_same_text() -> None:
    index = BlockIndex()
    store(index, TEXT, (("media", "cat"),))
    assert why(index, TEXT, 0, (("media", "dog"),)) == {"reason": "different_media"}
    assert why(index, TEXT, 0)["reason"] == "different_media"


def test_a_twin_must_spell_the_whole_prefix() -> None:
    """Equal tokens of one block are not enough: what came before them counts."""
    index = BlockIndex()
    store(index, [1, 2, 3, 4, *TEXT[4:]], (("lora", "poet"),))
    assert why(index, TEXT, 1)["reason"] == "never_seen"
    store(index, TEXT, (("lora", "poet"),))
    assert why(index, TEXT, 1) == {"reason": "different_adapter", "other": "poet"}


def test_a_block_that_came_back_is_not_gone() -> None:
    index = BlockIndex()
    first, *_ = store(index, TEXT)
    index.removed(first, 7)
    assert why(index, TEXT, 0) == {"reason": "evicted", "step": 7}
    store(index, TEXT)
    index.cleared(9)
    assert why(index, TEXT, 0) == {"reason": "cleared", "step": 9}


def test_salts_do_not_tell_of_each_other() -> None:
    index, keys = BlockIndex(), (("salt", "mine"),)
    store(index, TEXT, (("salt", "yours"),))
    changed = [*TEXT[:2], 5, 6, *TEXT[4:]]
    assert why(index, TEXT, 0, keys) == why(index, changed, 0, keys) == {"reason": "never_seen"}


@given(st.lists(st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE), max_size=40))
def test_it_stays_bounded_and_consistent(texts: list[list[int]]) -> None:
    index = BlockIndex(capacity=5)
    for text in texts:
        store(index, text)
        assert len(index) <= 5
    assert sum(map(len, index._children.values())) == sum(map(len, index._by_tokens.values())) == len(index)
    for text in texts:
        for place, block_hash in enumerate(chain(text)):
            if block_hash not in index._blocks:
                assert why(index, text, place)["reason"] == "left_index"


@given(st.sets(st.binary(min_size=32, max_size=32), max_size=50))
def test_the_filter_forgets_nothing(hashes: set[bytes]) -> None:
    known = HashFilter()
    for block_hash in hashes:
        known.add(block_hash)
    assert all(block_hash in known for block_hash in hashes)


def test_owners_see_their_own_alone() -> None:
    index = BlockIndex(capacity=4)
    hashes = chain(TEXT)
    index.stored(hashes, None, TEXT, SIZE, (), "ann")
    other = [*TEXT[:6], *range(500, 510)]
    place, parents = chain(other)[1], chain(other)[:1]

    def why_of(owner: str | None) -> str:
        return index.explain(place, parents, other, SIZE, (), owner).reason

    assert why_of("ann") == "text_differs"
    assert why_of("bob") == why_of(None) == "never_seen"
    index.seen(hashes[:2], "bob")
    assert why_of("bob") == "text_differs"
    for block_hash in hashes:
        index.removed(block_hash, 7)
    assert index.explain(hashes[3], hashes[:3], TEXT, SIZE, (), "ann").reason == "evicted"
    assert index.explain(hashes[3], hashes[:3], TEXT, SIZE, (), "bob").reason == "never_seen"
    # And when the index has forgotten them, only those who had them are told so.
    index.stored(chain(list(range(900, 916))), None, list(range(900, 916)), SIZE, (), "ann")
    assert index.explain(hashes[3], hashes[:3], TEXT, SIZE, (), "ann").reason == "left_index"
    assert index.explain(hashes[3], hashes[:3], TEXT, SIZE, (), "bob").reason == "never_seen"
