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


@pytest.mark.parametrize("seed", range(4))
def test_b115_clients_leave_at_any_moment(seed: int) -> None:
    """In prefill, between the two, in the transfer, in decode."""
    random = Random(seed)
    pair = Pair(lease_s=1.0, delay_s=0.01, num_kv_blocks=130)
    leaving: dict[str, float] = {}
    for number in range(100):
        pair.ask(make_request(f"r{number}", [number, *range(random.randrange(1, 40))], random.randrange(1, 20)))
        if random.random() < 0.8:
            leaving[f"r{number}"] = pair.clock.monotonic() + random.random() * 0.3
        for _ in range(random.randrange(6)):
            pair.turn()
        for request_id in [one for one, when in leaving.items() if when <= pair.clock.monotonic()]:
            pair.leave(request_id)
            del leaving[request_id]
    pair.run(PULL_LEASE_S + 2.0)
    pair.run()
    pair.assert_empty()
    requests = [make_request(f"after{number}", [7, number, *range(20)], 10, seed=number) for number in range(10)]
    for request in requests:
        pair.ask(request)
    pair.run()
    for request in requests:
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
