"""The engine core by itself: order of effects, verbs, faults of one request, starting and stopping."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import ConfigError, InvalidRequestError, NotAcceptingError
from headrace.core.engine_core import EngineCore
from headrace.core.inproc_client import InlineCore
from headrace.core.lifecycle import CoreState
from headrace.messages.outputs import EngineCoreOutputs, FinishReason, GraphSummary
from headrace.messages.requests import (
    Abort,
    AddLora,
    AnyControl,
    Drain,
    EngineCoreRequest,
    Profile,
    Query,
    Reload,
    ResetPrefixCache,
    Sleep,
    Stop,
    Wake,
)
from headrace.messages.sampling_params import StructuredOutputParams
from headrace.testing.engine_config import make_engine_config
from headrace.testing.fake_grammar import FakeGrammar
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor
from headrace.testing.tokens import expected_output

VOCAB, MAX_LEN = 1000, 128


def make_core(*, grammar: FakeGrammar | None = None, lazy: bool = False, **settings: Any) -> EngineCore:
    config = make_engine_config(max_model_len=MAX_LEN, **settings)
    clock = ManualClock()
    return EngineCore(config, SimulatedExecutor(config, clock=clock, lazy=lazy), clock, grammar=grammar)


def run(core: EngineCore, *requests: EngineCoreRequest) -> EngineCoreOutputs:
    """Run to the end; returns all that client 0 heard."""
    for request in requests:
        core.add_request(request)
    heard = EngineCoreOutputs(outputs=[], replies=[])
    for _ in range(2000):
        if not core.has_work:
            return heard
        for outputs in core.step().values():
            heard.outputs += outputs.outputs
            heard.replies += outputs.replies
            heard.stats = outputs.stats or heard.stats
    raise AssertionError("no end")


def tokens_of(heard: EngineCoreOutputs, request_id: str) -> list[int]:
    return [t for output in heard.outputs if output.request_id == request_id for t in output.new_token_ids]


def ends_of(heard: EngineCoreOutputs) -> dict[str, FinishReason]:
    return {output.request_id: output.finish_reason for output in heard.outputs if output.finish_reason is not None}


def ask(core: EngineCore, request: AnyControl) -> EngineCoreOutputs:
    """Send a verb with a call id and return what a step says then."""
    core.control(_numbered(request))
    return core.step().get(0, EngineCoreOutputs())


def _numbered(request: AnyControl) -> AnyControl:
    return type(request)(**{name: getattr(request, name) for name in request.__struct_fields__} | {"call_id": 7})


def test_ready_tells_the_final_numbers() -> None:
    ready = make_core(num_kv_blocks=65).ready
    assert (ready.max_model_len, ready.vocab_size, ready.num_blocks, ready.block_size) == (MAX_LEN, VOCAB, 65, 4)
    assert ready.kv_cache_tokens == 256
    assert ready.max_concurrency == 2.0
    assert set(ready.phases_ms) >= {"workers", "kv_cache"}


def test_too_little_memory_is_a_start_up_error_with_the_number_needed() -> None:
    with pytest.raises(ConfigError, match=r"needs 33 KV blocks.*room for 10"):
        make_core(num_kv_blocks=10)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_pipeline_is_filled_before_anything_is_committed(depth: int) -> None:
    core = make_core(pipeline_depth=depth)
    core.add_request(make_request("r", max_tokens=10))
    silent = 0
    while not core.step():
        silent += 1
    assert silent == depth - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_between_forward_and_commit_drops_the_token(depth: int) -> None:
    core = make_core(pipeline_depth=depth, lazy=True)
    core.add_request(make_request("r", max_tokens=50))
    core.add_request(make_request("other", max_tokens=3))
    for _ in range(depth - 1):
        core.step()
    core.abort_soon(["r", "nobody", "r"])
    heard = run(core)
    assert tokens_of(heard, "r") == []
    assert ends_of(heard) == {"r": FinishReason.ABORT, "other": FinishReason.LENGTH}
    assert heard.stats is not None
    assert (heard.stats.num_running, heard.stats.num_waiting, heard.stats.kv_cache_usage) == (0, 0, 0.0)


def test_a_request_that_cannot_be_prepared_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    core.add_request(make_request("too-long", prompt=MAX_LEN + 1))
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "add_request", lambda *_: 1 / 0)
        core.add_request(make_request("unlucky"))
    heard = run(core, make_request("fine"))
    assert ends_of(heard) == {
        "too-long": FinishReason.ERROR,
        "unlucky": FinishReason.ERROR,
        "fine": FinishReason.LENGTH,
    }
    errors = {output.request_id: output.error for output in heard.outputs if output.error}
    assert "prompt" in (errors["too-long"] or "")
    assert "ZeroDivisionError" in (errors["unlucky"] or "")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_grammar_rows_get_the_mask_of_their_position(depth: int, lazy: bool) -> None:
    core = make_core(grammar=FakeGrammar(VOCAB), pipeline_depth=depth, lazy=lazy)
    constrained = {"structured_outputs": StructuredOutputParams(regex="x")}
    requests = [make_request(f"g{i}", 3 + i, 6 + i, seed=i, sampling=constrained) for i in range(3)]
    free = make_request("free", 5, 9, seed=4)
    heard = run(core, *requests, free)
    for request in requests:
        tokens = tokens_of(heard, request.request_id)
        assert [token % 2 for token in tokens] == [i % 2 for i in range(request.sampling.max_tokens or 0)]
    assert tokens_of(heard, "free") == expected_output(free, vocab_size=VOCAB, max_model_len=MAX_LEN).token_ids
    assert set(ends_of(heard).values()) == {FinishReason.LENGTH}


def test_without_grammars_a_constrained_request_is_refused_by_name() -> None:
    heard = run(make_core(), make_request("g", sampling={"structured_outputs": StructuredOutputParams(regex="x")}))
    assert ends_of(heard) == {"g": FinishReason.ERROR}
    assert "structured_outputs" in (heard.outputs[-1].error or "")


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("verb", [ResetPrefixCache(reset_running=True), Sleep(), Reload()])
def test_verbs_that_forget_kv_leave_answers_alone(depth: int, verb: AnyControl) -> None:
    core = make_core(pipeline_depth=depth)
    requests = [make_request(f"r{i}", 6, 12, seed=i) for i in range(4)]
    for request in requests:
        core.add_request(request)
    heard = EngineCoreOutputs(outputs=[], replies=[])
    for turn in range(400):
        if turn in (5, 9):
            core.control(_numbered(verb))
            if core.state is CoreState.SLEEPING:
                assert not core.scheduler.num_running
                core.control(Wake())
        for outputs in core.step().values():
            heard.outputs += outputs.outputs
            heard.replies += outputs.replies
    assert [reply.error for reply in heard.replies] == [None, None]
    for request in requests:
        expected = expected_output(request, vocab_size=VOCAB, max_model_len=MAX_LEN)
        assert tokens_of(heard, request.request_id) == expected.token_ids


def test_a_failing_reload_is_told_and_leaves_the_core_ready() -> None:
    core = make_core()
    (reply,) = ask(core, Reload(path="/nowhere")).replies
    assert reply.error == "no model in /nowhere"
    assert core.state is CoreState.READY
    assert ends_of(run(core, make_request("r"))) == {"r": FinishReason.LENGTH}


def test_every_verb_has_a_handler_and_an_answer() -> None:
    verbs: list[AnyControl] = [
        Abort(request_ids=["nobody"]),
        Wake(),
        ResetPrefixCache(),
        AddLora(name="a", path="b"),
        Profile(start=True),
        Query(topic="config"),
        Query(topic="attention"),
        Query(topic="graphs"),
        Query(topic="stats"),
        Sleep(),
        Wake(),
        Drain(),
        Stop(),
    ]
    core = make_core()
    for verb in verbs:
        replies = ask(core, verb).replies
        assert [reply.error for reply in replies] == [None], verb


def test_what_capture_gave_is_known() -> None:
    core = make_core()
    assert core.ready.graphs == GraphSummary(mode="EAGER", reason="there is no model")
    assert core.perform(Query(topic="graphs")) == {"mode": "EAGER", "reason": "there is no model"}


def test_a_core_that_woke_in_part_still_sleeps() -> None:
    core = make_core()
    core.add_request(make_request("held", max_tokens=5))
    core.step()
    core.perform(Sleep(level=2))
    assert not core.has_work
    assert core.perform(Wake(tags=("weights",))) == "sleeping"
    with pytest.raises(InvalidRequestError, match="kv_cache, weights"):
        core.perform(Wake(tags=("everything",)))
    assert core.perform(Wake(tags=("kv_cache",))) == "ready"
    assert ends_of(run(core)) == {"held": FinishReason.LENGTH}


def test_a_sleeping_core_forgets_what_is_aborted() -> None:
    core = make_core()
    core.add_request(make_request("held", max_tokens=5))
    core.perform(Sleep())
    core.abort_soon(["held"])
    assert core.has_work
    assert ends_of(run(core)) == {"held": FinishReason.ABORT}


def test_sleep_and_reload_are_refused_while_draining() -> None:
    core = make_core()
    core.perform(Drain())
    for verb in (Sleep(), Reload(), Wake()):
        with pytest.raises(NotAcceptingError, match="draining"):
            core.perform(verb)


def test_a_prefix_cache_in_use_is_not_reset_unless_asked_to() -> None:
    core = make_core()
    core.add_request(make_request("r", max_tokens=20))
    core.step()
    assert core.perform(ResetPrefixCache()) is False
    assert core.perform(ResetPrefixCache(reset_running=True)) is True


def test_stop_ends_what_runs_and_the_core() -> None:
    core = make_core(pipeline_depth=2)
    core.add_request(make_request("r", max_tokens=50))
    core.step()
    heard = ask(core, Stop())
    assert heard.outputs[-1].finish_reason is FinishReason.ABORT
    assert core.stopped
    core.shutdown()
    core.shutdown()


def test_an_inline_core_steps_in_the_caller_s_thread() -> None:
    core = InlineCore(make_engine_config(pipeline_depth=2), "headrace.testing.simulated_executor:make_executor")
    request = make_request("r", max_tokens=9)
    core.add_request(request)
    tokens: list[int] = []
    while core.has_work:
        tokens += [t for output in core.step().outputs for t in output.new_token_ids]
    assert tokens == expected_output(request, vocab_size=VOCAB, max_model_len=MAX_LEN).token_ids
    assert core.control(Query(topic="state"))["state"] == "ready"
    core.shutdown()
