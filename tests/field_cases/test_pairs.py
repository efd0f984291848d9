"""Field cases of prefill and decode apart, over two real cores and an imagined network."""

from __future__ import annotations

from random import Random

import pytest

from headrace.kv_connector.protocol import LoadFailurePolicy
from headrace.messages.outputs import FinishReason
from headrace.testing.requests import make_request
from tests.field_cases.pair import PULL_LEASE_S, Pair

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8)])
def test_b119_short_prompts_and_warm_sides(depth: int, sizes: tuple[int, int]) -> None:
    """Shorter than a block, exactly one, one more; each again with the prefix on both sides, and on one alone."""
    pair = Pair(depth=depth, block_sizes=sizes)
    size = max(sizes)
    for length in (1, size - 1, size, size + 1, 3 * size):
        prompt = [length * 31 + i for i in range(length)]
        for number, reset in enumerate((None, None, pair.prefill, pair.decode)):
            if reset is not None:
                assert reset.scheduler.reset_prefix_cache(False)
            request = make_request(f"r{length}-{number}", prompt, 6, seed=number)
            pair.ask(request)
            pair.run()
            pair.assert_right(request)
    pair.assert_empty()


def is_at(pair: Pair, request_id: str, phase: str) -> bool:
    """Whether a request has come as far as the moment at which its client leaves."""
    match phase:
        case "prefill":
            request = pair.prefill.scheduler.get_request(request_id)
            return request is not None and request.num_computed_tokens > 0
        case "between":
            return request_id in pair.network.offers and pair.decode.scheduler.get_request(request_id) is None
        case "transfer":
            return request_id in pair.network.pulls
        case _:
            return bool(pair.tokens[request_id])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phase", ["prefill", "between", "transfer", "decode"])
def test_b115_clients_leave_at_any_moment(seed: int, phase: str) -> None:
    """Most leave in one phase; whoever stays, then and later, is answered rightly, and no block is lost."""
    random = Random(seed)
    pair = Pair(lease_s=1.0, delay_s=0.05, pause_s=0.02)
    stays, leaves, num_left = [], set(), 0
    for number in range(60):
        request = make_request(f"r{number}", [number, *range(random.randrange(1, 40))], random.randrange(2, 20))
        pair.ask(request)
        if random.random() < 0.7:
            leaves.add(request.request_id)
        else:
            stays.append(request)
        for _ in range(random.randrange(2, 6)):
            pair.turn()
            for request_id in [one for one in leaves if is_at(pair, one, phase)]:
                pair.leave(request_id)
                leaves.discard(request_id)
                num_left += 1
    assert num_left > 10
    pair.run(PULL_LEASE_S + 2.0)
    pair.run()
    pair.assert_empty()
    later = [make_request(f"after{number}", [7, number, *range(20)], 10, seed=number) for number in range(10)]
    for request in later:
        pair.ask(request)
    pair.run()
    for request in (*stays, *later):
        pair.assert_right(request)
    pair.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_b116_a_pull_after_the_lease(depth: int, policy: LoadFailurePolicy) -> None:
    """The blocks are others' by then: computed again or refused, never wrong text."""
    pair = Pair(lease_s=1.0, delay_s=3.0, policy=policy, num_kv_blocks=33, depth=depth)
    request = make_request("r", 21, 12)
    pair.ask(request)
    pair.run(1.5)
    # What was offered is overwritten before it is asked for.
    for number in range(8):
        pair.prefill.add_request(make_request(f"other{number}", [number] * 30, 1))
    pair.run(0.5)
    pair.run()
    if policy == "recompute":
        pair.assert_right(request)
    else:
        end = pair.ended["r"]
        assert (end.finish_reason, pair.tokens["r"]) == (FinishReason.ERROR, [])
        assert "KV transfer" in (end.error or "")
    pair.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("held", [0, 1, 5, 8, 20])
def test_b118_less_than_was_announced(depth: int, held: int) -> None:
    """The decode side is told of 21 tokens and gets fewer: it computes the rest itself before any text."""
    pair = Pair(depth=depth)
    pair.network.num_held = held
    request = make_request("r", 21, 12)
    pair.ask(request)
    pair.run()
    pair.assert_right(request)
    pair.assert_empty()


def test_b118_a_refusal_of_the_prefill_side() -> None:
    """A prompt that only the decode side could take ends with the prefill side's error; nothing is offered."""
    pair = Pair()
    pair.ask(make_request("r", 200, 1))
    pair.run()
    assert not pair.network.offers
    assert not pair.tokens["r"]
    pair.assert_empty()
