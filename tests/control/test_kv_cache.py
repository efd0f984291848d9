"""The pieces of the KV cache: queue, hashes, pool, groups, manager, plan, events."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.control.kv_cache.block import KVBlock
from headrace.control.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.control.kv_cache.free_queue import FreeQueue
from headrace.control.kv_cache.hashing import ExtraKey, HashChain, make_root
from headrace.control.kv_cache.manager import BlockState, KVCacheManager
from headrace.control.kv_cache.planning import describe, max_concurrency, num_cache_tokens, plan_kv_cache
from headrace.messages.kv_cache import KVCacheConfig, KVCacheKind
from tests.control.fake_runner import BLOCK, EventLog, make_kv, make_spec

SLIDING = KVCacheKind.SLIDING_WINDOW
LOCAL = KVCacheKind.CHUNKED_LOCAL


@dataclass
class Holder:
    """The least that the manager asks of a request."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    takes_hits: bool = True
    hash_chain: HashChain = field(default_factory=lambda: HashChain(BLOCK))


def make_manager(num_blocks: int = 17, *specs, caching: bool = True, events=None) -> KVCacheManager:  # type: ignore[no-untyped-def]
    return KVCacheManager(make_kv(num_blocks, *specs), max_model_len=64, enable_prefix_caching=caching, events=events)


def run_through(manager: KVCacheManager, holder: Holder) -> None:
    """Admit and compute everything in one step, and commit it."""
    hit = manager.get_computed_blocks(holder)
    count = len(holder.token_ids) - hit.num_tokens
    assert manager.allocate_slots(holder, count, hit=hit) is not None
    holder.num_computed_tokens = len(holder.token_ids)
    manager.cache_committed(holder, holder.num_computed_tokens)
    manager.check_invariants()


# Free queue


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(0, 30)), max_size=80))
def test_free_queue_is_a_deque_with_removal(operations: list[tuple[str, int]]) -> None:
    blocks = [KVBlock(i) for i in range(12)]
    queue, model, out = FreeQueue(blocks), deque(blocks), deque[KVBlock]()
    for operation, number in operations:
        if operation == "pop":
            count = number % (len(model) + 1)
            popped = queue.pop_front(count)
            assert popped == [model.popleft() for _ in range(count)]
            out.extend(popped)
        elif operation == "remove" and model:
            block = model[number % len(model)]
            queue.remove(block)
            model.remove(block)
            out.append(block)
        elif operation in ("append", "prepend"):
            given_back = [out.popleft() for _ in range(number % (len(out) + 1))]
            if operation == "append":
                queue.append_all(given_back)
                model.extend(given_back)
            else:
                queue.prepend_all(given_back)
                model.extendleft(given_back)
        assert list(queue) == list(model) and len(queue) == len(model)


def test_free_queue_refuses_a_block_twice() -> None:
    block = KVBlock(1)
    queue = FreeQueue([block])
    with pytest.raises(AssertionError):
        queue.append_all([block])
    with pytest.raises(AssertionError):
        FreeQueue().remove(KVBlock(2))


# Hashes


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from headrace.control.kv_cache.hashing import HashChain, ExtraKey;"
        "c = HashChain(4, [ExtraKey('salt', 's')]); c.extend(list(range(12)), 12); print(c.hashes[-1].hex())"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    chain = HashChain(4, [ExtraKey("salt", "s")])
    chain.extend(list(range(12)), 12)
    assert runs == {chain.hashes[-1].hex() + "\n"}


def test_extending_in_pieces_changes_nothing() -> None:
    tokens = list(range(100, 140))
    whole, pieces = HashChain(BLOCK), HashChain(BLOCK)
    whole.extend(tokens, 40)
    for end in (3, 4, 9, 17, 40):
        pieces.extend(tokens, end)
        assert len(pieces.hashes) == end // BLOCK
    assert whole.hashes == pieces.hashes and len(set(whole.hashes)) == 10


def test_extra_keys_are_typed_and_framed() -> None:
    keys = [
        [],
        [ExtraKey("salt", "a")],
        [ExtraKey("lora", "a")],
        [ExtraKey("salt", "ab")],
        [ExtraKey("salt", "a"), ExtraKey("lora", "b")],
        [ExtraKey("salta", "")],
        [ExtraKey("salt", "a\x04\x00\x00\x00\x00\x00\x00\x00lora")],
    ]
    assert len({make_root(BLOCK, k) for k in keys}) == len(keys)
    assert make_root(4) != make_root(8)


@given(st.integers(1, 5), st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sampled_from(["", "x", "ü"]))
def test_hashing_is_its_slow_twin(block_size: int, tokens: list[int], salt: str) -> None:
    chain = HashChain(block_size, [ExtraKey("salt", salt)])
    parent, expected = make_root(block_size, [ExtraKey("salt", salt)]), []
    for end in range(block_size, len(tokens) + 1, block_size):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[end - block_size : end])
        parent = sha256(parent + data).digest()
        expected.append(parent)
    assert chain.extend(tokens, len(tokens)) == expected


# Manager


def test_a_full_hit_leaves_the_last_token() -> None:
    manager = make_manager()
    first = Holder("a", list(range(8)))
    run_through(manager, first)
    manager.free("a")
    assert manager.get_computed_blocks(Holder("b", list(range(8)))).num_tokens == 4
    assert manager.get_computed_blocks(Holder("c", list(range(9)))).num_tokens == 8
    assert manager.get_computed_blocks(Holder("d", [*range(7), 99, 1])).num_tokens == 4


def test_b098_salted_requests_never_share() -> None:
    manager = make_manager()
    run_through(manager, Holder("a", list(range(9)), hash_chain=HashChain(BLOCK, [ExtraKey("salt", "a")])))
    for chain in (
        HashChain(BLOCK),
        HashChain(BLOCK, [ExtraKey("salt", "b")]),
        HashChain(BLOCK, [ExtraKey("lora", "a")]),
    ):
        assert manager.get_computed_blocks(Holder("b", list(range(9)), hash_chain=chain)).num_tokens == 0
    same = Holder("c", list(range(9)), hash_chain=HashChain(BLOCK, [ExtraKey("salt", "a")]))
    assert manager.get_computed_blocks(same).num_tokens == 8


def test_nothing_is_findable_before_its_step_is_committed() -> None:
    manager = make_manager()
    a = Holder("a", list(range(9)))
    manager.allocate_slots(a, 9)
    assert manager.get_computed_blocks(Holder("b", list(range(9)))).num_tokens == 0
    a.num_computed_tokens = 9
    manager.cache_committed(a, 9)
    assert manager.get_computed_blocks(Holder("b", list(range(9)))).num_tokens == 8


def test_none_changes_nothing() -> None:
    manager = make_manager(9)
    run_through(manager, Holder("a", list(range(12))))
    manager.free("a")
    other = Holder("x", [7] * 8)
    run_through(manager, other)
    before = (manager.pool.num_free, [b.block_id for b in manager.pool.free_queue], manager.pool.num_findable)
    big = Holder("b", [*range(12), *range(50, 80)])
    hit = manager.get_computed_blocks(big)
    assert hit.num_tokens == 12
    assert manager.allocate_slots(big, 30, hit=hit) is None
    assert manager.allocate_slots(big, 4, hit=hit, whole_tokens=42) is None
    assert manager.allocate_slots(big, 4, hit=hit, reserved_blocks=4) is None
    assert before == (manager.pool.num_free, [b.block_id for b in manager.pool.free_queue], manager.pool.num_findable)
    manager.check_invariants()


def test_five_parts_make_one_table() -> None:
    manager = make_manager(33)
    run_through(manager, Holder("a", list(range(9))))
    b = Holder("b", [*range(8), *range(70, 90)])
    hit = manager.get_computed_blocks(b)
    added = manager.allocate_slots(b, 5, hit=hit, num_external_tokens=6, num_lookahead_tokens=3)
    assert added is not None and len(added[0]) == 4
    assert len(manager.get_block_ids("b")[0]) == 6
    assert manager.get_block_ids("b")[0][:2] == manager.get_block_ids("a")[0][:2]
    b.num_computed_tokens = 19
    assert manager.allocate_slots(b, 3) == ([],)
    manager.check_invariants()


def test_slots_end_at_the_context() -> None:
    manager = make_manager(33)
    a = Holder("a", list(range(62)))
    manager.allocate_slots(a, 62, num_lookahead_tokens=50)
    assert manager.num_slots("a") == 64


def test_unhashed_blocks_are_reused_first_then_the_least_recent_from_the_tail() -> None:
    manager = make_manager(13)
    run_through(manager, Holder("a", list(range(10))))
    run_through(manager, Holder("b", list(range(100, 110))))
    a, b = manager.get_block_ids("a")[0], manager.get_block_ids("b")[0]
    manager.free("a")
    manager.free("b")
    order = [block.block_id for block in manager.pool.free_queue]
    assert order[:2] == [b[2], a[2]]
    assert order[-4:] == [a[1], a[0], b[1], b[0]]


def test_a_hit_is_not_evicted_by_its_own_allocation() -> None:
    manager = make_manager(5)
    run_through(manager, Holder("a", list(range(16))))
    manager.free("a")
    b = Holder("b", [*range(8), *range(50, 58)])
    hit = manager.get_computed_blocks(b)
    assert hit.num_tokens == 8
    assert manager.allocate_slots(b, 8, hit=hit) is not None
    ids = manager.get_block_ids("b")[0]
    assert len(set(ids)) == 4
    manager.check_invariants()


def test_blocks_behind_a_fence_come_back_when_the_step_is_committed() -> None:
    manager = make_manager()
    run_through(manager, Holder("a", list(range(9))))
    manager.free("a", fence=5)
    assert manager.pool.num_free == 13 and manager.has_fenced
    manager.release_fenced(4)
    assert manager.pool.num_free == 13
    manager.check_invariants()
    manager.release_fenced(5)
    assert manager.pool.num_free == 16 and not manager.has_fenced


def test_block_states_say_who_holds_what() -> None:
    manager = make_manager(13)
    run_through(manager, Holder("a", list(range(9))))
    run_through(manager, Holder("b", list(range(10))))
    run_through(manager, Holder("c", [50] * 9))
    run_through(manager, Holder("d", [70] * 5))
    manager.free("c", fence=3)
    manager.free("d")
    states = [BlockState(state).name for state in manager.get_block_states()]
    count = {name: states.count(name) for name in states}
    assert count == {"NULL": 1, "SHARED": 2, "OWNED": 2, "PENDING": 3, "CACHED": 1, "FREE": 4}
    assert states[0] == "NULL"


def test_equal_contents_keep_their_own_blocks() -> None:
    manager = make_manager()
    a, b = Holder("a", list(range(9))), Holder("b", list(range(9)))
    for holder in (a, b):
        manager.allocate_slots(holder, 9)
        holder.num_computed_tokens = 9
    before = manager.get_block_ids("b")
    manager.cache_committed(a, 9)
    manager.cache_committed(b, 9)
    assert manager.get_block_ids("b") == before and manager.pool.num_findable == 2
    manager.check_invariants()


def test_reset_needs_nobody_at_work() -> None:
    events = EventLog()
    manager = make_manager(events=events)
    run_through(manager, Holder("a", list(range(9))))
    assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(Holder("b", list(range(9)))).num_tokens == 0
    assert isinstance(events.events[-1], AllBlocksCleared)


def test_evicted_blocks_stay_with_their_owner() -> None:
    manager = make_manager()
    run_through(manager, Holder("a", list(range(9))))
    manager.evict(manager.get_block_ids("a")[0])
    assert manager.get_computed_blocks(Holder("b", list(range(9)))).num_tokens == 0
    assert manager.pool.num_free == 13
    manager.check_invariants()


# Groups


def test_a_window_frees_what_it_no_longer_sees() -> None:
    manager = make_manager(17, make_spec(SLIDING, 6))
    a = Holder("a", list(range(24)))
    run_through(manager, a)
    assert manager.get_block_ids("a")[0].count(0) == (24 - 6 + 1) // BLOCK
    assert manager.pool.num_free == 16 - 2


def test_a_window_hit_needs_only_the_window() -> None:
    manager = make_manager(17, make_spec(SLIDING, 6))
    run_through(manager, Holder("a", list(range(20))))
    ids = manager.get_block_ids("a")[0]
    hit = manager.get_computed_blocks(Holder("b", list(range(21))))
    assert hit.num_tokens == 20
    assert [b.block_id for b in hit.blocks[0]] == ids
    # The middle of the window is gone: the hit ends where a whole window is left.
    manager.evict([ids[4]])
    assert manager.get_computed_blocks(Holder("c", list(range(21)))).num_tokens == 16


@given(st.data())
def test_the_longest_common_hit_is_what_brute_force_finds(data: st.DataObject) -> None:
    kinds = st.sampled_from([(KVCacheKind.FULL, 0), (SLIDING, 3), (SLIDING, 9), (LOCAL, 8), (LOCAL, 12), (LOCAL, 6)])
    specs = [make_spec(kind, window) for kind, window in data.draw(st.lists(kinds, min_size=1, max_size=3))]
    manager = make_manager(65, *specs)
    holder = Holder("a", list(range(41)))
    for group in manager.coordinator.groups:
        group.append("a", 0, 40)
        group.store("a", holder.hash_chain.extend(holder.token_ids, 40), 10)
        for index in data.draw(st.sets(st.integers(0, 9), max_size=5)):
            manager.evict([group.tables["a"][index].block_id])
    groups, hashes = manager.coordinator.groups, holder.hash_chain.hashes

    def possible(length: int) -> bool:
        return all(
            hashes[i] in manager.pool.findable(g.group_id)
            for g in groups
            for i in range(g.first_needed_block(g.spec, length * BLOCK), length)
        )

    best = max(length for length in range(11) if possible(length))
    assert manager.get_computed_blocks(holder).num_tokens == best * BLOCK


# Plan


def test_plan_groups_layers_and_fills_the_memory() -> None:
    full, window = make_spec(), make_spec(SLIDING, 8)
    plan = plan_kv_cache([full, window, full, window], 256 * 100, 64, BLOCK)
    assert plan.num_blocks == 100
    assert [g.layer_indices for g in plan.groups] == [(0, 2), (1, 3)]
    assert max_concurrency(plan, 64) == 99 / (16 + 4)
    assert "KV cache" in describe(plan, 64)


def test_plan_counts_tokens() -> None:
    plan = plan_kv_cache([make_spec()] * 2, 128 * 41, 64, BLOCK)
    assert num_cache_tokens(plan, 64) == 160


def test_too_little_memory_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"needs 17 KV blocks \(1088 bytes"):
        plan_kv_cache([make_spec()], 64 * 16, 64, BLOCK)
    with pytest.raises(ConfigError, match="17"):
        plan_kv_cache([make_spec()], 1 << 30, 64, BLOCK, num_blocks_override=9)
    assert plan_kv_cache([make_spec()], 0, 64, BLOCK, num_blocks_override=17).num_blocks == 17


def test_plan_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match=r"layer 1.*mamba"):
        plan_kv_cache([make_spec(), make_spec(KVCacheKind.MAMBA)], 1 << 20, 64, BLOCK)
    with pytest.raises(ConfigError, match="block size"):
        plan_kv_cache([make_spec(block_size=8)], 1 << 20, 64, BLOCK)


# Random operations


class Mirror:
    """Rebuilds the findable set from events."""

    def __init__(self) -> None:
        self.found: set[tuple[int, bytes]] = set()

    def emit(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, BlockStored):
            self.found |= {(event.group_id, h) for h in event.block_hashes}
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        elif isinstance(event, BlockRemoved):
            self.found.remove((event.group_id, event.block_hash))
        else:
            self.found.clear()


def operate(seed: int, count: int, config: KVCacheConfig, check_every: int) -> None:
    """Random admissions, steps, commits, ends, fences and leases; every block is accounted for."""
    random, mirror = Random(seed), Mirror()
    manager = KVCacheManager(config, max_model_len=64, events=mirror)
    texts = [[random.randrange(50) for _ in range(60)] for _ in range(4)]
    live: dict[str, Holder] = {}
    leased: list[str] = []
    fence = 0
    for number in range(count):
        action = random.random()
        if action < 0.3 and len(live) < 12:
            text = [*random.choice(texts)[: random.randrange(1, 50)], random.randrange(50)]
            holder = Holder(f"r{number}", text, takes_hits=random.random() < 0.9)
            hit = manager.get_computed_blocks(holder)
            free, external = manager.pool.num_free, random.choice([0, 0, 3])
            external = min(external, len(text) - 1 - hit.num_tokens)
            new = random.randrange(1, len(text) - hit.num_tokens - external + 1)
            added = manager.allocate_slots(
                holder, new, hit=hit, num_external_tokens=external, whole_tokens=len(text) * (random.random() < 0.5)
            )
            if added is None:
                assert manager.pool.num_free == free
            else:
                holder.num_computed_tokens = hit.num_tokens + external + new
                live[holder.request_id] = holder
        elif action < 0.7 and live:
            holder = random.choice(list(live.values()))
            manager.cache_committed(holder, holder.num_computed_tokens)
            if holder.num_computed_tokens == len(holder.token_ids) < 60:
                holder.token_ids.append(random.randrange(50))
            new = min(random.randrange(1, 6), len(holder.token_ids) - holder.num_computed_tokens)
            if (
                new > 0
                and manager.allocate_slots(holder, new, num_lookahead_tokens=random.choice([0, 0, 2])) is not None
            ):
                holder.num_computed_tokens += new
        elif action < 0.85 and live:
            request_id = random.choice(list(live))
            del live[request_id]
            way = random.random()
            if way < 0.5:
                manager.free(request_id)
            elif way < 0.8:
                fence += 1
                manager.free(request_id, fence)
            else:
                manager.lease(request_id)
                leased.append(request_id)
        elif action < 0.92:
            manager.release_fenced(fence - random.randrange(2))
        elif action < 0.97 and leased:
            manager.end_lease(leased.pop(random.randrange(len(leased))))
        elif action < 0.98 and live:
            holder = random.choice(list(live.values()))
            valid = random.randrange(holder.num_computed_tokens // BLOCK + 1)
            if manager.invalidate(holder.request_id, valid):
                holder.num_computed_tokens = min(holder.num_computed_tokens, valid * BLOCK)
            else:
                manager.free(holder.request_id)
                del live[holder.request_id]
        elif action > 0.9995:
            manager.reset_prefix_cache()
        if number % check_every == 0:
            manager.check_invariants()
            keys = {(g, h) for g in range(len(config.groups)) for h in manager.pool.findable(g)}
            assert keys == mirror.found
    for request_id in live:
        manager.free(request_id)
    for request_id in leased:
        manager.end_lease(request_id)
    manager.release_fenced(fence)
    manager.check_invariants()
    assert manager.pool.num_free == manager.pool.num_usable


MIXES = [
    make_kv(40),
    make_kv(60, make_spec(), make_spec(SLIDING, 7)),
    make_kv(90, make_spec(LOCAL, 8), make_spec(), make_spec(SLIDING, 10)),
]


@pytest.mark.slow
@pytest.mark.parametrize("mix", range(3))
def test_no_block_is_lost_in_random_operations(mix: int) -> None:
    operate(mix, 34_000, MIXES[mix], check_every=97)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mix", range(3))
def test_no_block_is_lost_in_a_million_random_operations(mix: int) -> None:
    operate(100 + mix, 1_000_000, MIXES[mix], check_every=997)
