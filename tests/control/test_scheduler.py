"""The scheduler's rules, one by one, and equal tokens whatever the pressure."""

from __future__ import annotations

import itertools

import pytest

from headrace.base.errors import InvalidRequestError
from headrace.control.scheduler.request import RequestStatus
from headrace.messages.kv_cache import KVCacheKind
from headrace.messages.outputs import FinishReason
from tests.control.driver import Driver
from tests.control.fake_runner import BLOCK, expected_tokens, make_kv, make_request, make_spec

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 131 + i * 17) % 997 for i in range(length)]


@DEPTHS
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("batched", [5, 16, 64])
def test_same_tokens_whatever_runs_beside(depth: int, policy: str, batched: int) -> None:
    driver = Driver(make_kv(33), depth=depth, scheduling_policy=policy, max_num_batched_tokens=batched, max_num_seqs=4)
    requests = [make_request(f"r{i}", prompt(i % 3, 3 + 5 * i), 6 + i, priority=i % 2, arrival=i) for i in range(9)]
    driver.add(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)
    driver.assert_empty()


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_b034_preempted_requests_lose_no_token(depth: int, caching: bool) -> None:
    driver = Driver(make_kv(20), depth=depth, caching=caching)
    requests = [make_request(f"r{i}", prompt(i, 10), 40) for i in range(6)]
    driver.add(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)
        assert len(driver.tokens[request.request_id]) == 40
    assert driver.scheduler.make_stats().num_preemptions > 0
    driver.assert_empty()


@DEPTHS
def test_b035_priority_under_pressure(depth: int) -> None:
    driver = Driver(make_kv(20), depth=depth, scheduling_policy="priority")
    low = [make_request(f"low{i}", prompt(i, 10), 30, priority=5, arrival=i) for i in range(3)]
    high = [make_request(f"high{i}", prompt(i + 9, 10), 30, priority=1, arrival=9 + i) for i in range(3)]
    driver.add(*low)
    for _ in range(4):
        driver.turn()
    driver.add(*high)
    driver.run()
    for request in [*low, *high]:
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)
    order = list(driver.ended)
    assert set(order[:2]) <= {"high0", "high1", "high2", "low0"}
    assert max(order.index(r.request_id) for r in high) < max(order.index(r.request_id) for r in low)
    driver.assert_empty()


@DEPTHS
@pytest.mark.parametrize("length", [k * BLOCK + d for k in range(1, 5) for d in (-1, 0, 1)])
def test_b032_hit_and_miss_give_the_same(depth: int, length: int) -> None:
    driver = Driver(depth=depth)
    texts = [prompt(1, length), prompt(1, length), [*prompt(1, length), 5], prompt(1, length)[:-1] or [7]]
    for index, text in enumerate(texts):
        request = make_request(f"r{index}", text, 5)
        driver.add(request)
        driver.run()
        assert driver.tokens[f"r{index}"] == expected_tokens(request, 64)
        assert driver.ended[f"r{index}"].num_cached_tokens <= len(text) - 1
    assert driver.ended["r1"].num_cached_tokens == (length - 1) // BLOCK * BLOCK


def test_b092_recomputed_tokens_are_no_hits() -> None:
    driver = Driver(make_kv(20))
    driver.add(*[make_request(f"r{i}", prompt(i, 10), 40) for i in range(6)])
    driver.run()
    stats = driver.scheduler.make_stats()
    assert stats.num_preemptions > 0 and stats.recompute_tokens > 0
    assert stats.prefix_hits == 0 and stats.prefix_queries == 60
    assert all(output.num_cached_tokens == 0 for output in driver.ended.values())
    assert stats.prompt_tokens == 60 and stats.generation_tokens == 240


@DEPTHS
def test_b025_b037_prompt_logprobs_come_once_and_complete(depth: int) -> None:
    driver = Driver(make_kv(17), depth=depth, max_num_batched_tokens=6)
    long = make_request("long", prompt(3, 30), 8, prompt_logprobs=1)
    decodes = [make_request(f"d{i}", prompt(i, 4), 30) for i in range(3)]
    driver.add(*decodes)
    for _ in range(3):
        driver.turn()
    driver.add(long)
    driver.run()
    outputs = driver.outputs["long"]
    assert all(output.new_token_ids for output in outputs), "an output before the first token"
    chunks = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(chunks) == 1 and outputs[0].prompt_logprobs is chunks[0]
    assert chunks[0].start == 1
    assert [entry.token_ids[0] for entry in chunks[0].entries] == long.prompt_token_ids[1:]
    assert driver.tokens["long"] == expected_tokens(long, 64)


def test_b025_prompt_logprobs_survive_a_preemption_half_way() -> None:
    driver = Driver(make_kv(17), max_num_batched_tokens=8)
    long = make_request("long", prompt(3, 40), 4, prompt_logprobs=0)
    driver.add(long)
    driver.turn()
    driver.turn()
    assert driver.scheduler.reset_prefix_cache(True)
    driver.run()
    (chunk,) = [o.prompt_logprobs for o in driver.outputs["long"] if o.prompt_logprobs]
    assert [entry.token_ids[0] for entry in chunk.entries] == long.prompt_token_ids[1:]


def test_prompt_logprobs_take_no_hit_but_are_cached() -> None:
    driver = Driver()
    driver.add(make_request("a", prompt(1, 20), 2, prompt_logprobs=0))
    driver.run()
    driver.add(make_request("b", prompt(1, 20), 2, prompt_logprobs=0))
    driver.run()
    driver.add(make_request("c", prompt(1, 20), 2))
    driver.run()
    assert [driver.ended[i].num_cached_tokens for i in "abc"] == [0, 0, 16]


def test_b031_an_id_in_use_is_refused() -> None:
    driver = Driver()
    driver.add(make_request("x", prompt(1, 4)))
    with pytest.raises(InvalidRequestError, match="in use"):
        driver.scheduler.add_request(make_request("x", prompt(2, 4)), 0.0)
    driver.run()
    driver.add(make_request("x", prompt(2, 4)))


def test_b038_a_request_that_cannot_fit_is_refused() -> None:
    driver = Driver(make_kv(9), max_model_len=64)
    with pytest.raises(InvalidRequestError, match="blocks"):
        driver.scheduler.add_request(make_request("big", prompt(1, 40)), 0.0)
    with pytest.raises(InvalidRequestError, match="tokens"):
        driver.scheduler.add_request(make_request("long", prompt(1, 64)), 0.0)
    small = make_request("small", prompt(1, 5))
    driver.add(small)
    driver.run()
    assert driver.tokens["small"] == expected_tokens(small, 64)


def test_what_fits_alone_always_runs() -> None:
    driver = Driver(make_kv(17), watermark=0.9)
    driver.add(*[make_request(f"r{i}", prompt(i, 60), None) for i in range(3)])
    driver.run()
    assert all(len(driver.tokens[f"r{i}"]) == 4 for i in range(3))


@DEPTHS
@pytest.mark.parametrize("max_tokens", [None, 10000])
def test_b058_generation_ends_at_the_context(depth: int, max_tokens: int | None) -> None:
    driver = Driver(depth=depth)
    driver.add(make_request("r", prompt(1, 50), max_tokens))
    driver.run()
    assert len(driver.tokens["r"]) == 14
    assert driver.ended["r"].finish_reason is FinishReason.LENGTH
    computed = sum(step.num_scheduled_tokens["r"] for step in driver.steps)
    assert computed == 63, "the last token is never computed"


@DEPTHS
def test_tokens_past_a_stop_are_dropped(depth: int) -> None:
    plain = make_request("plain", prompt(1, 6), 20)
    stop = expected_tokens(plain, 64)[4]
    driver = Driver(depth=depth)
    driver.add(
        make_request("eos", prompt(1, 6), 20, eos=(stop,)),
        make_request("stop", prompt(1, 6), 20, stop_token_ids=(stop,)),
    )
    driver.run()
    assert driver.tokens["eos"] == driver.tokens["stop"] == expected_tokens(plain, 64)[:5]
    assert driver.ended["eos"].stop_reason is None and driver.ended["stop"].stop_reason == stop
    assert driver.ended["eos"].finish_reason is FinishReason.STOP
    assert driver.scheduler.make_stats().generation_tokens == 10
    driver.assert_empty()


def test_min_tokens_gates_every_stop() -> None:
    plain = expected_tokens(make_request("p", prompt(1, 6), 20), 64)
    driver = Driver()
    driver.add(make_request("r", prompt(1, 6), 8, stop_token_ids=tuple(plain[:5]), min_tokens=5))
    driver.run()
    assert driver.tokens["r"] == plain[:5]


def test_no_tokens_asked() -> None:
    driver = Driver(max_num_batched_tokens=8)
    request = make_request("r", prompt(1, 20), 1, prompt_logprobs=0)
    zero = type(request)(**{f: getattr(request, f) for f in request.__struct_fields__} | {"sampling": _zero_tokens()})
    driver.add(zero)
    driver.run()
    assert driver.tokens["r"] == [] and driver.ended["r"].finish_reason is FinishReason.LENGTH
    assert len(driver.ended["r"].prompt_logprobs.entries) == 19  # type: ignore[union-attr]


def _zero_tokens():  # type: ignore[no-untyped-def]
    import msgspec

    from headrace.messages.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0)
    msgspec.structs.force_setattr(sampling, "max_tokens", 0)
    return sampling


@DEPTHS
def test_b043_streams_flow_while_prompts_fill_the_step(depth: int) -> None:
    driver = Driver(make_kv(300), depth=depth, max_model_len=256, max_num_batched_tokens=16)
    # The older long prompt stands before the streams in rank.
    driver.add(make_request("long", prompt(1, 200), 4))
    driver.turn()
    driver.add(make_request("s", prompt(2, 4), 30))
    # Admitted when the long prompt leaves room; from then on it is in every step.
    driver.run()
    first = next(i for i, step in enumerate(driver.steps) if "s" in step.num_scheduled_tokens)
    last = max(i for i, step in enumerate(driver.steps) if "s" in step.num_scheduled_tokens)
    assert all("s" in step.num_scheduled_tokens for step in driver.steps[first : last + 1])
    assert driver.tokens["s"] == expected_tokens(make_request("s", prompt(2, 4), 30), 256)


def test_b043_running_streams_are_granted_before_a_chunk() -> None:
    driver = Driver(make_kv(300), max_model_len=256, max_num_batched_tokens=16)
    driver.add(*[make_request(f"s{i}", prompt(i, 3), 40) for i in range(3)])
    driver.turn()
    driver.add(*[make_request(f"p{i}", prompt(9 + i, 150), 2) for i in range(3)])
    for _ in range(20):
        driver.turn()
        assert all(f"s{i}" in driver.steps[-1].num_scheduled_tokens for i in range(3))
        assert driver.steps[-1].total_num_scheduled_tokens == 16


def test_b043_a_short_prompt_passes_inside_a_long_one_under_the_threshold() -> None:
    driver = Driver(make_kv(300), max_model_len=512, max_num_batched_tokens=32, long_prefill_token_threshold=24)
    driver.add(make_request("long", prompt(1, 400), 2))
    driver.turn()
    assert driver.steps[-1].num_scheduled_tokens == {"long": 32}, "alone, the threshold only slows"
    driver.add(make_request("short", prompt(2, 5), 2))
    driver.turn()
    assert driver.steps[-1].num_scheduled_tokens["short"] == 5


@DEPTHS
def test_b043_a_short_prompt_does_not_wait_for_a_whole_long_one(depth: int) -> None:
    """Without any setting; each in its turn, and the step stays full."""
    driver = Driver(make_kv(300), depth=depth, max_model_len=512, max_num_batched_tokens=32)
    driver.add(make_request("long", prompt(1, 400), 2))
    driver.turn()
    shorts = [make_request(f"s{i}", prompt(2 + i, 5), 2) for i in range(3)]
    driver.add(*shorts)
    while not all(request.request_id in driver.ended for request in shorts):
        driver.turn()
    assert "long" not in driver.ended and len(driver.steps) < 9 + depth
    chunks = [step.total_num_scheduled_tokens for step in driver.steps if step.num_scheduled_tokens.get("long", 0) > 1]
    assert set(chunks[:5]) == {32}
    driver.run()
    for request in (*shorts, make_request("long", prompt(1, 400), 2)):
        assert driver.tokens[request.request_id] == expected_tokens(request, 512)


def test_long_prompts_share_a_step() -> None:
    driver = Driver(make_kv(300), max_model_len=512, max_num_batched_tokens=32, long_prefill_token_threshold=24)
    driver.add(*[make_request(f"p{i}", prompt(i, 200), 2) for i in range(3)])
    for _ in range(4):
        driver.turn()
    grants = driver.steps[-1].num_scheduled_tokens
    assert len(grants) == 3 and max(grants.values()) - min(grants.values()) <= 4


def test_gap_cap_bounds_prompt_chunks_once_the_cost_is_known() -> None:
    driver = Driver(make_kv(300), max_model_len=512, max_num_batched_tokens=256, max_token_gap_ms=20.0)
    cost = driver.scheduler._state.cost
    for _ in range(50):
        cost.record(0.010, 0)
        cost.record(0.010 + 0.001 * 8, 8)
    assert cost.max_prompt_tokens(0.020, 4) in (9, 10)
    driver.add(make_request("s", prompt(1, 4), 30))
    driver.turn()
    for _ in range(50):
        cost.record(0.010, 0)
    driver.add(make_request("p", prompt(2, 200), 2))
    driver.turn()
    assert driver.steps[-1].num_scheduled_tokens["s"] == 1
    assert 4 <= driver.steps[-1].num_scheduled_tokens["p"] <= 12


def test_throttled_prefills_wait_while_streams_run() -> None:
    driver = Driver()
    driver.add(make_request("s", prompt(1, 4), 10))
    driver.turn()
    driver.add(make_request("p", prompt(2, 20), 2))
    step = driver.schedule(throttle_prefills=True)
    assert step is not None and step.num_scheduled_tokens == {"s": 1}
    assert driver.scheduler.make_stats().waiting_reasons == {"throttled": 1}


def test_b016_b019_abort_before_it_ran_twice_and_unknown() -> None:
    driver = Driver(max_num_seqs=1)
    a, b = make_request("a", prompt(1, 6), 10), make_request("b", prompt(2, 6), 10)
    driver.add(a, b)
    driver.turn()
    driver.finish(["b", "nobody"])
    driver.finish(["b"])
    driver.run()
    assert driver.ended["b"].finish_reason is FinishReason.ABORT and driver.tokens["b"] == []
    assert driver.tokens["a"] == expected_tokens(a, 64)
    driver.assert_empty()


@DEPTHS
def test_abort_in_flight_is_ignored_at_commit(depth: int) -> None:
    driver = Driver(depth=depth)
    a, b = make_request("a", prompt(1, 6), 10), make_request("b", prompt(2, 6), 10)
    driver.add(a, b)
    for _ in range(depth):
        driver.launch()
    driver.finish(["b"])
    driver.run()
    assert driver.tokens["b"] == [] and driver.tokens["a"] == expected_tokens(a, 64)
    driver.assert_empty()


def test_outputs_go_to_their_clients() -> None:
    driver = Driver()
    driver.scheduler.add_request(make_request("a", prompt(1, 4), 1, client=0), 0.0)
    driver.scheduler.add_request(make_request("b", prompt(2, 4), 1, client=3), 0.0)
    step = driver.scheduler.schedule(0.0)
    outputs = driver.scheduler.update_from_output(step, driver.runner.execute(step), 0.1)
    assert {client: [o.request_id for o in m.outputs] for client, m in outputs.items()} == {0: ["a"], 3: ["b"]}


def test_a_preempted_request_keeps_its_rank() -> None:
    driver = Driver(make_kv(17), max_num_seqs=2)
    driver.add(*[make_request(f"r{i}", prompt(i, 8), 40) for i in range(4)])
    driver.run()
    assert list(driver.ended) == ["r0", "r1", "r2", "r3"]
    assert driver.scheduler.make_stats().num_preemptions > 0


def test_a_head_that_does_not_fit_is_passed_for_a_bounded_time() -> None:
    driver = Driver(make_kv(17), max_head_bypass_steps=5, max_num_batched_tokens=64)
    driver.add(make_request("run", prompt(0, 8), 30))
    driver.turn()
    driver.add(make_request("big", prompt(1, 60), 2))
    for i in range(40):
        driver.add(make_request(f"s{i}", prompt(10 + i, 4), 3))
    driver.run()
    order = list(driver.ended)
    assert 0 < order.index("big") < 30


def test_pure_decode_takes_blocks_only_at_borders() -> None:
    driver = Driver()
    driver.add(make_request("r", prompt(1, 4), 20))
    driver.run()
    takes = [i for i, step in enumerate(driver.steps) if step.cached.new_block_ids]
    assert [b - a for a, b in itertools.pairwise(takes)] == [4] * (len(takes) - 1)


@DEPTHS
def test_rewind_and_rerun_in_halves_finds_the_culprit(depth: int) -> None:
    driver = Driver(depth=depth)
    requests = [make_request(f"r{i}", prompt(i, 6), 12) for i in range(4)]
    driver.add(*requests)
    for _ in range(4):
        driver.turn()
    while driver.in_flight:
        driver.commit()
    step = driver.schedule()
    assert step is not None
    younger = [driver.schedule() for _ in range(depth - 1)]
    assert all(younger)
    driver.runner.fail = {"r2"}
    with pytest.raises(RuntimeError):
        driver.runner.execute(step)
    ids = driver.scheduler.rewind(step)
    driver.scheduler.check_invariants()
    assert ids == ["r0", "r1", "r2", "r3"]
    pending = [ids]
    while pending:
        part = pending.pop()
        retry = driver.schedule(only=set(part))
        assert retry is not None and set(retry.num_scheduled_tokens) == set(part)
        try:
            output = driver.runner.execute(retry)
        except RuntimeError:
            assert driver.scheduler.rewind(retry) == part
            if len(part) == 1:
                driver.finish(part, FinishReason.ERROR)
            else:
                half = len(part) // 2
                pending += [part[half:], part[:half]]
            continue
        driver.take(driver.scheduler.update_from_output(retry, output, driver.now))
        driver.scheduler.check_invariants()
    driver.runner.fail = set()
    driver.run()
    assert driver.ended["r2"].finish_reason is FinishReason.ERROR
    for request in requests:
        if request.request_id != "r2":
            assert driver.tokens[request.request_id] == expected_tokens(request, 64)
    driver.assert_empty()


@DEPTHS
def test_reset_prefix_cache(depth: int) -> None:
    driver = Driver(depth=depth)
    a = make_request("a", prompt(1, 10), 20)
    driver.add(a)
    for _ in range(depth):
        driver.launch()
    assert not driver.scheduler.reset_prefix_cache(False)
    assert driver.scheduler.reset_prefix_cache(True)
    driver.scheduler.check_invariants()
    assert driver.scheduler.kv.pool.num_findable == 0
    driver.run()
    assert driver.tokens["a"] == expected_tokens(a, 64)
    driver.assert_empty()


@DEPTHS
def test_nothing_in_flight_is_findable(depth: int) -> None:
    driver = Driver(depth=depth)
    driver.add(make_request("a", prompt(1, 16), 4))
    driver.launch()
    driver.scheduler.add_request(make_request("b", prompt(1, 16), 4), 0.0)
    assert driver.scheduler.kv.pool.num_findable == 0
    driver.tokens["b"], driver.outputs["b"] = [], []
    driver.run()
    assert driver.tokens["a"] == driver.tokens["b"]


@DEPTHS
@pytest.mark.parametrize(
    "specs",
    [
        (make_spec(KVCacheKind.SLIDING_WINDOW, 10),),
        (make_spec(), make_spec(KVCacheKind.SLIDING_WINDOW, 6)),
        (make_spec(KVCacheKind.CHUNKED_LOCAL, 8), make_spec()),
        (make_spec(KVCacheKind.SLIDING_WINDOW, 5), make_spec(KVCacheKind.CHUNKED_LOCAL, 12), make_spec()),
    ],
)
def test_mixed_groups_under_pressure(depth: int, specs: tuple) -> None:  # type: ignore[type-arg]
    driver = Driver(make_kv(1 + 20 * len(specs), *specs), depth=depth, max_num_batched_tokens=40)
    requests = [make_request(f"r{i}", prompt(i % 2, 9 + 7 * (i % 4)), 25) for i in range(8)]
    driver.add(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)
    driver.assert_empty()


def test_a_window_longer_prompt_than_the_pool_runs_a_block_at_a_time() -> None:
    driver = Driver(make_kv(8, make_spec(KVCacheKind.SLIDING_WINDOW, 8)), max_model_len=256, max_num_batched_tokens=64)
    request = make_request("r", prompt(1, 100), 20)
    driver.add(request)
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 256)
    driver.assert_empty()


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_nothing_but_the_number_of_steps(depth: int, num_drafts: int) -> None:
    from tests.control.fake_runner import next_token

    def drafter(tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for i in range(num_drafts):
            right = next_token(tokens + drafts)
            drafts.append(right if (len(tokens) + i) % 3 else (right + 1) % 1000)
        return drafts

    driver = Driver(make_kv(33), depth=depth, num_draft_tokens=num_drafts)
    driver.drafter = drafter
    requests = [make_request(f"r{i}", prompt(i, 5 + i), 30) for i in range(4)]
    driver.add(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)
    driver.assert_empty()


def test_status_table_has_no_way_out_of_an_end() -> None:
    from headrace.control.scheduler.request import FINISHED, LEGAL_MOVES

    assert set(LEGAL_MOVES) == set(RequestStatus)
    assert all(not LEGAL_MOVES[status] for status in FINISHED)


def test_stats_read_live_state() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(*[make_request(f"r{i}", prompt(i, 8), 4) for i in range(3)])
    driver.turn()
    stats = driver.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_queued_tokens) == (1, 2, 16)
    assert stats.waiting_reasons == {"running_limit": 2}
    assert stats.kv_cache_usage > 0
    driver.finish(None)
    stats = driver.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
