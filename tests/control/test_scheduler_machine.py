"""Any order of arrivals, steps, commits, aborts, failures and resets: invariants after each, and the right tokens."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.messages.kv_cache import KVCacheKind
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import EngineCoreRequest
from tests.control.driver import Driver
from tests.control.fake_runner import expected_tokens, make_kv, make_request, make_spec, next_token

MIXES = [
    (make_spec(),),
    (make_spec(), make_spec(KVCacheKind.SLIDING_WINDOW, 6)),
    (make_spec(KVCacheKind.SLIDING_WINDOW, 9),),
    (make_spec(KVCacheKind.CHUNKED_LOCAL, 8), make_spec()),
]
TEXTS = [[(seed * 131 + i * 17) % 997 for i in range(60)] for seed in range(3)]


class SchedulerMachine(RuleBasedStateMachine):
    """Drives the scheduler and the fake runner."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        specs = data.draw(st.sampled_from(MIXES))
        drafts = data.draw(st.sampled_from([0, 0, 0, 2]))
        self.driver = Driver(
            make_kv(1 + data.draw(st.integers(17, 30)) * len(specs), *specs),
            depth=data.draw(st.integers(1, 3)),
            caching=data.draw(st.booleans()),
            num_draft_tokens=drafts,
            max_num_seqs=data.draw(st.integers(1, 6)),
            max_num_batched_tokens=data.draw(st.sampled_from([4, 7, 16, 64])),
            scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])),
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 6])),
            watermark=data.draw(st.sampled_from([0.0, 0.1])),
            max_head_bypass_steps=data.draw(st.sampled_from([0, 3])),
            max_token_gap_ms=data.draw(st.sampled_from([0.0, 15.0])),
            max_token_gap_factor=data.draw(st.sampled_from([0.0, 1.5])),
        )
        if drafts:
            self.driver.drafter = lambda tokens: [next_token(tokens), (len(tokens) * 7) % 1000]

    @rule(
        text=st.integers(0, 2),
        length=st.integers(1, 59),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(0, 2),
        logprobs=st.sampled_from([None, None, 0]),
        stops=st.booleans(),
    )
    def add(
        self, text: int, length: int, max_tokens: int | None, priority: int, logprobs: int | None, stops: bool
    ) -> None:
        request_id = f"r{len(self.requests)}"
        eos = tuple(range(0, 1000, 9)) if stops else ()
        request = make_request(
            request_id, TEXTS[text][:length], max_tokens, priority=priority, prompt_logprobs=logprobs, eos=eos
        )
        self.requests[request_id] = request
        self.driver.add(request)

    @precondition(lambda self: len(self.driver.in_flight) < self.driver.depth)
    @rule(throttle=st.booleans())
    def launch(self, throttle: bool) -> None:
        self.driver.launch(throttle_prefills=throttle)

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.driver.scheduler.has_unfinished)
    @rule(turns=st.integers(1, 12))
    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.driver.turn()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if request_id not in self.driver.ended:
            self.aborted.add(request_id)
        self.driver.finish([request_id])

    @precondition(lambda self: self.driver.in_flight)
    @rule(only_some=st.booleans())
    def fail_step(self, only_some: bool) -> None:
        """The oldest step raised; those behind it ran for nothing."""
        step, _ = self.driver.in_flight[0]
        self.driver.in_flight.clear()
        ids = self.driver.scheduler.rewind(step)
        self.driver.scheduler.check_invariants()
        if only_some and ids:
            self.driver.launch(only=frozenset(ids[::2]))
            if self.driver.in_flight:
                self.driver.commit()

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        done = self.driver.scheduler.reset_prefix_cache(running)
        assert done or not running
        self.driver.scheduler.check_invariants()

    @invariant()
    def outputs_are_prefixes(self) -> None:
        for request_id, request in self.requests.items():
            tokens = self.driver.tokens[request_id]
            expected = expected_tokens(request, 64)
            assert tokens == expected[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for request_id, request in self.requests.items():
            outputs = self.driver.outputs[request_id]
            if request_id in self.aborted:
                assert self.driver.ended[request_id].finish_reason is FinishReason.ABORT
                continue
            assert self.driver.tokens[request_id] == expected_tokens(request, 64)
            assert self.driver.ended[request_id].num_cached_tokens < len(request.prompt_token_ids)
            if request.sampling.prompt_logprobs is not None:
                (chunk,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
                assert [e.token_ids[0] for e in chunk.entries] == request.prompt_token_ids[1:]
        self.driver.assert_empty()


SETTINGS = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.slow
class TestScheduler(SchedulerMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=50, stateful_step_count=40, **SETTINGS)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestSchedulerLong(SchedulerMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=600, stateful_step_count=80, **SETTINGS)
