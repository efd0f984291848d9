"""KV that comes from elsewhere or is read from elsewhere: late, broken, aborted, expired."""

from __future__ import annotations

import msgspec
import pytest

from headrace.control.scheduler.preemption import preempt
from headrace.control.scheduler.recorder import WaitReason
from headrace.control.scheduler.request import RequestStatus
from headrace.kv_connector.protocol import ExternalHit, LoadFailurePolicy, SendLease
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput
from headrace.messages.scheduler_output import BlockIds
from tests.control.driver import Driver
from tests.control.fake_runner import BLOCK, FakeRunner, expected_tokens, make_kv, make_request, make_spec

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 131 + i * 17) % 997 for i in range(length)]


class RemoteKV:
    """A connector that has KV for ``hits`` tokens of each named request; the test says when it arrives."""

    def __init__(self, hits: dict[str, int], *, is_async: bool, policy: LoadFailurePolicy = "recompute") -> None:
        self.load_failure_policy: LoadFailurePolicy = policy
        self.hits = hits
        self.is_async = is_async
        self.undecided = 0
        self.send_lease_s: float | None = None
        self.allocated: dict[str, tuple[BlockIds, int, int]] = {}
        self.finished: list[tuple[str, BlockIds]] = []
        self.expired: list[str] = []
        self.runner: FakeRunner | None = None
        self.requests: dict[str, EngineCoreRequest] = {}
        self.broken: set[int] = set()

    def get_external_hit(
        self, request: EngineCoreRequest, num_tokens: int, num_local_tokens: int
    ) -> ExternalHit | None:
        if self.undecided:
            self.undecided -= 1
            return None
        num_tokens = max(0, self.hits.get(request.request_id, 0) - num_local_tokens)
        return ExternalHit(num_tokens, self.is_async, lease_s=1.0)

    def on_allocated(
        self, request: EngineCoreRequest, block_ids: BlockIds, num_local_tokens: int, num_tokens: int
    ) -> None:
        if num_tokens > num_local_tokens:
            self.allocated[request.request_id] = (block_ids, num_local_tokens, num_tokens)
            self.requests[request.request_id] = request
            if not self.is_async:
                self.write(request.request_id)

    def write(self, request_id: str) -> None:
        """The transfer itself, blocks in ``broken`` (by index) left out."""
        block_ids, start, end = self.allocated[request_id]
        assert self.runner is not None
        for position in range(start, end):
            if position // BLOCK in self.broken:
                continue
            for group, table in enumerate(block_ids):
                slot = (group, table[position // BLOCK], position % BLOCK)
                self.runner.memory[slot] = (position, self.requests[request_id].prompt_token_ids[position])

    def on_finished(self, request: EngineCoreRequest, block_ids: BlockIds, num_tokens: int) -> SendLease:
        self.finished.append((request.request_id, block_ids))
        return SendLease(self.send_lease_s, {"from": request.request_id} if self.send_lease_s else None)

    def on_expired(self, request_id: str) -> None:
        self.expired.append(request_id)

    def make_metadata(self) -> bytes | None:
        return None

    def on_output(self, output: ConnectorOutput) -> None:
        return None


def make_driver(connector: RemoteKV, **more: object) -> Driver:
    driver = Driver(connector=connector, **more)  # type: ignore[arg-type]
    connector.runner = driver.runner
    return driver


def tell(driver: Driver, **news: tuple[object, ...]) -> None:
    """Let the worker side report with the next commit, running a request if nothing else would."""
    if not driver.in_flight and not driver.launch():
        driver.add(make_request(f"poll{driver.now}{len(driver.steps)}", [1, 2, 3], 1))
        assert driver.launch()
    step, output = driver.in_flight[0]
    driver.in_flight[0] = (step, msgspec.structs.replace(output, connector=ConnectorOutput(**news)))  # type: ignore[arg-type]
    driver.commit()


@DEPTHS
@pytest.mark.parametrize("hit", [1, 3, 8, 11, 12])
def test_a_load_that_arrives_saves_the_work(depth: int, hit: int) -> None:
    connector = RemoteKV({"r": hit}, is_async=True)
    driver = make_driver(connector, depth=depth)
    request = make_request("r", prompt(1, 12), 6)
    driver.add(request)
    driver.launch()
    assert driver.scheduler.get_request("r").status is RequestStatus.WAITING_FOR_REMOTE_KVS  # type: ignore[union-attr]
    assert driver.scheduler.has_pending_transfers
    connector.write("r")
    tell(driver, finished_receiving=("r",))
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 64)
    assert driver.ended["r"].num_cached_tokens == min(hit, 11)
    # What arrived and was acknowledged is findable.
    again = make_request("again", prompt(1, 12), 2)
    driver.add(again)
    driver.run()
    assert driver.ended["again"].num_cached_tokens == 8
    driver.assert_empty()


def test_an_undecided_connector_is_asked_again() -> None:
    connector = RemoteKV({}, is_async=False)
    connector.undecided = 2
    driver = make_driver(connector)
    driver.add(make_request("r", prompt(1, 6), 2))
    assert not driver.launch() and not driver.launch() and driver.launch()


@DEPTHS
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_follows_the_policy(depth: int, policy: LoadFailurePolicy) -> None:
    driver = make_driver(RemoteKV({"r": 9}, is_async=True, policy=policy), depth=depth)
    request = make_request("r", prompt(1, 12), 6)
    driver.add(request)
    driver.launch()
    tell(driver, failed_receiving=("r",))
    driver.run()
    if policy == "fail":
        assert driver.ended["r"].finish_reason is FinishReason.ERROR and "KV transfer" in (
            driver.ended["r"].error or ""
        )
    else:
        assert driver.tokens["r"] == expected_tokens(request, 64)
        assert driver.ended["r"].num_cached_tokens == 0
    driver.assert_empty()


@DEPTHS
def test_b113_aborted_loads_come_back_after_the_lease_and_late_news_is_ignored(depth: int) -> None:
    connector = RemoteKV({f"r{i}": 8 for i in range(5)}, is_async=True)
    driver = make_driver(connector, depth=depth)
    driver.add(*[make_request(f"r{i}", prompt(i, 12), 6) for i in range(5)])
    driver.launch()
    pool = driver.scheduler.kv.pool
    used = pool.num_usable - pool.num_free
    assert used == 15
    driver.finish([f"r{i}" for i in range(5)])
    assert pool.num_usable - pool.num_free == used, "a writer may still be at work"
    assert not driver.scheduler.has_unfinished and driver.scheduler.has_pending_transfers
    driver.now = 2.0
    driver.schedule()
    assert sorted(connector.expired) == [f"r{i}" for i in range(5)]
    driver.assert_empty()
    driver.add(make_request("next", prompt(9, 12), 3))
    tell(driver, finished_receiving=tuple(f"r{i}" for i in range(5)))
    driver.run()
    driver.assert_empty()


def test_an_aborted_load_that_reports_frees_its_blocks_at_once() -> None:
    driver = make_driver(RemoteKV({"r": 8}, is_async=True))
    driver.add(make_request("r", prompt(1, 12), 6))
    driver.launch()
    driver.finish(["r"])
    tell(driver, finished_receiving=("r",))
    driver.run()
    driver.assert_empty()


def test_a_load_that_never_reports_is_given_up() -> None:
    driver = make_driver(RemoteKV({"r": 8}, is_async=True))
    request = make_request("r", prompt(1, 12), 6)
    driver.add(request)
    driver.launch()
    driver.now = 5.0
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 64)


@DEPTHS
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("bad", [0, 1])
def test_invalid_blocks_of_a_load_within_the_step(depth: int, policy: LoadFailurePolicy, bad: int) -> None:
    connector = RemoteKV({"r": 11}, is_async=False, policy=policy)
    driver = make_driver(connector, depth=depth)
    driver.runner._check_view = lambda *_: None  # type: ignore[method-assign]  # the step reads what never came
    request, other = make_request("r", prompt(1, 12), 6), make_request("o", prompt(2, 6), 9)
    driver.add(request, other)
    connector.broken = {bad}
    for _ in range(depth):
        driver.launch()
    del driver.runner._check_view
    block_id = connector.allocated["r"][0][0][bad]
    tell(driver, invalid_block_ids=(block_id,))
    if policy == "recompute":
        live = driver.scheduler.get_request("r")
        assert live is not None and live.num_computed_tokens == bad * BLOCK and driver.tokens["r"] == []
    driver.run()
    assert driver.tokens["o"] == expected_tokens(other, 64)
    if policy == "fail":
        assert driver.ended["r"].finish_reason is FinishReason.ERROR
    else:
        assert driver.tokens["r"] == expected_tokens(request, 64)
    driver.assert_empty()


@DEPTHS
def test_sharers_of_an_invalid_block_compute_it_again(depth: int) -> None:
    connector = RemoteKV({"a": 8}, is_async=True)
    driver = make_driver(connector, depth=depth)
    a, b = make_request("a", prompt(1, 12), 20), make_request("b", prompt(1, 14), 20)
    driver.add(a)
    driver.launch()
    connector.write("a")
    tell(driver, finished_receiving=("a",))
    driver.add(b)
    while len(driver.in_flight) < depth:
        driver.launch()
    shared = connector.allocated["a"][0][0][1]
    assert driver.scheduler.kv.pool.blocks[shared].ref_count == 2
    tell(driver, invalid_block_ids=(shared,))
    for request in (a, b):
        live = driver.scheduler.get_request(request.request_id)
        assert live is not None and live.num_computed_tokens <= BLOCK
    assert driver.scheduler.kv.pool.blocks[shared].block_hash is None
    driver.run()
    for request in (a, b):
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)
    driver.assert_empty()


@DEPTHS
def test_b017_abort_after_the_end_leaves_the_reader_its_blocks(depth: int) -> None:
    connector = RemoteKV({}, is_async=False)
    connector.send_lease_s = 10.0
    driver = make_driver(connector, depth=depth)
    driver.add(make_request("r", prompt(1, 8), 1))
    driver.run()
    assert driver.ended["r"].kv_transfer_params == {"from": "r"}
    pool = driver.scheduler.kv.pool
    assert pool.num_usable - pool.num_free == 2
    driver.finish(["r"])
    driver.finish(["r"])
    assert pool.num_usable - pool.num_free == 2
    driver.add(make_request("s", prompt(2, 8), 3))
    driver.launch()
    tell(driver, finished_sending=("r", "r"))
    driver.finish(["r"])
    driver.run()
    assert pool.num_usable - pool.num_free == 3, "only s is kept for its reader"
    driver.now = 60.0
    driver.schedule()
    assert connector.expired == ["s"]
    driver.assert_empty()


def test_b016_abort_before_it_was_ever_scheduled_with_a_connector() -> None:
    connector = RemoteKV({}, is_async=False)
    connector.send_lease_s = 10.0
    driver = make_driver(connector, max_num_seqs=1)
    a = make_request("a", prompt(1, 6), 4)
    driver.add(a, make_request("b", prompt(2, 6), 4))
    driver.turn()
    driver.finish(["b", "b", "nobody"])
    assert connector.finished == [("b", ([],))]
    driver.run()
    assert driver.tokens["a"] == expected_tokens(a, 64)


def test_blocks_kept_for_a_reader_do_not_stop_the_others() -> None:
    connector = RemoteKV({}, is_async=False)
    connector.send_lease_s = 1.0
    driver = make_driver(connector, kv=make_kv(18))
    requests = [make_request(f"r{i}", prompt(i, 30), 10) for i in range(4)]
    driver.add(*requests)
    for _ in range(400):
        driver.now += 0.05
        driver.turn()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(request, 64)


def test_loads_survive_windows() -> None:
    connector = RemoteKV({"r": 30}, is_async=True)
    from headrace.messages.kv_cache import KVCacheKind

    driver = make_driver(connector, kv=make_kv(60, make_spec(), make_spec(KVCacheKind.SLIDING_WINDOW, 6)))
    request = make_request("r", prompt(1, 40), 6)
    driver.add(request)
    driver.launch()
    table = connector.allocated["r"][0][1]
    assert table[:6] == [0] * 6 and all(table[6:])
    connector.write("r")
    tell(driver, finished_receiving=("r",))
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 64)
    driver.assert_empty()


def test_a_rewound_step_asks_for_its_external_hit_again() -> None:
    connector = RemoteKV({"r": 8}, is_async=False)
    driver = make_driver(connector)
    request = make_request("r", prompt(1, 12), 4)
    driver.add(request)
    step = driver.schedule()
    assert step is not None
    assert driver.scheduler.rewind(step) == []
    driver.scheduler.check_invariants()
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 64)
    driver.assert_empty()


class Grammars:
    """Compiles when told; forbids token ``forbidden``."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.errors: dict[str, str] = {}
        self.accepted: dict[str, list[int]] = {}
        self.forbidden: int | None = None
        self.forgotten: list[str] = []

    def start(self, request: EngineCoreRequest) -> None:
        self.accepted[request.request_id] = []

    def is_ready(self, request_id: str) -> bool:
        return request_id in self.ready or request_id in self.errors

    def get_error(self, request_id: str) -> str | None:
        return self.errors.get(request_id)

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        self.accepted[request_id] += token_ids
        return "the grammar forbids this token" if self.forbidden in token_ids else None

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def structured(request_id: str, seed: int) -> EngineCoreRequest:
    from headrace.messages.sampling_params import StructuredOutputParams

    return make_request(request_id, prompt(seed, 6), 5, structured_outputs=StructuredOutputParams(json_object=True))


@DEPTHS
def test_a_compiling_grammar_steps_aside_and_keeps_its_place(depth: int) -> None:
    grammar = Grammars()
    driver = Driver(grammar=grammar, depth=depth, max_num_seqs=1)
    g, plain = structured("g", 1), make_request("p", prompt(2, 6), 3)
    driver.add(g, plain)
    driver.turn()
    assert driver.scheduler.get_request("g").status is RequestStatus.WAITING_FOR_GRAMMAR  # type: ignore[union-attr]
    assert driver.scheduler.make_stats().waiting_reasons == {"grammar": 1} or driver.scheduler.num_running == 1
    grammar.ready.add("g")
    driver.add(make_request("q", prompt(3, 6), 3))
    driver.run()
    assert list(driver.ended) == ["p", "g", "q"]
    assert grammar.accepted["g"] == driver.tokens["g"] == expected_tokens(g, 64)
    assert [s.grammar for s in driver.steps if "g" in s.num_scheduled_tokens] == [["g"]] * 5
    assert grammar.forgotten == ["g"]


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    grammar = Grammars()
    driver = Driver(grammar=grammar)
    driver.add(structured("bad", 1), structured("worse", 2), make_request("p", prompt(3, 6), 3))
    grammar.errors["bad"] = "unsupported keyword"
    grammar.ready.add("worse")
    grammar.forbidden = expected_tokens(structured("worse", 2), 64)[2]
    driver.run()
    assert driver.ended["bad"].error == "unsupported keyword"
    assert driver.ended["worse"].finish_reason is FinishReason.ERROR and len(driver.tokens["worse"]) == 2
    assert driver.ended["p"].finish_reason is FinishReason.LENGTH
    driver.assert_empty()


def test_without_grammars_a_structured_request_fails_by_name() -> None:
    driver = Driver()
    driver.add(structured("g", 1))
    driver.turn()
    assert "structured_outputs" in (driver.ended["g"].error or "")


def test_a_failed_row_ends_alone() -> None:
    driver = Driver()
    a, b = make_request("a", prompt(1, 6), 5), make_request("b", prompt(2, 6), 5)
    driver.add(a, b)
    driver.turn()
    driver.launch()
    step, output = driver.in_flight[0]
    tokens = [[] if i == "b" else t for i, t in zip(output.request_ids, output.sampled_token_ids, strict=True)]
    failed = ModelRunnerOutput(
        request_ids=output.request_ids, sampled_token_ids=tokens, errors={"b": "non-finite logits"}
    )
    driver.in_flight[0] = (step, failed)
    driver.run()
    assert driver.ended["b"].error == "non-finite logits"
    assert driver.tokens["a"] == expected_tokens(a, 64)
    driver.assert_empty()


@pytest.mark.parametrize("bad", [0, 2, 5, 6])
def test_an_invalid_block_before_a_window_means_starting_over(bad: int) -> None:
    from headrace.messages.kv_cache import KVCacheKind

    connector = RemoteKV({"r": 30}, is_async=True)
    driver = make_driver(connector, kv=make_kv(60, make_spec(), make_spec(KVCacheKind.SLIDING_WINDOW, 6)))
    request = make_request("r", prompt(1, 40), 6)
    driver.add(request)
    driver.launch()
    connector.write("r")
    tell(driver, finished_receiving=("r",))
    driver.turn()
    tell(driver, invalid_block_ids=(connector.allocated["r"][0][0][bad],))
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 64)
    driver.assert_empty()


def test_a_request_preempted_before_its_load_is_judged_drops_what_it_made() -> None:
    connector = RemoteKV({"r": 11}, is_async=False)
    driver = make_driver(connector, depth=2)
    driver.runner._check_view = lambda *_: None  # type: ignore[method-assign]  # the step reads what never came
    request = make_request("r", prompt(1, 12), 6)
    driver.add(request)
    connector.broken = {1}
    driver.launch()
    del driver.runner._check_view
    assert driver.in_flight[0][1].sampled_token_ids == [expected_tokens(request, 64)[:1]]
    victim = driver.scheduler.get_request("r")
    assert victim is not None
    preempt(driver.scheduler._state, victim, "another", WaitReason.NO_BLOCKS)
    tell(driver, invalid_block_ids=(connector.allocated["r"][0][0][1],))
    assert driver.tokens["r"] == []
    connector.broken = set()
    driver.run()
    assert driver.tokens["r"] == expected_tokens(request, 64)
    driver.assert_empty()
