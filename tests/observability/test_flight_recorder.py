"""Every cause that can hold a request up is named, and time is attributed without a rest."""

from __future__ import annotations

from random import Random

import pytest

from headrace.control.scheduler.recorder import WaitReason
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import ResetPrefixCache, Sleep, Wake
from headrace.messages.sampling_params import StructuredOutputParams
from headrace.observability.explain import CAUSES
from headrace.observability.flight_recorder.recorder import FlightRecorder
from headrace.testing.fake_connector import FakeConnector, FakeHits, FakeWorkerConnector
from headrace.testing.fake_grammar import FakeGrammar
from headrace.testing.faults import FaultPlan
from headrace.testing.requests import make_request
from tests.observability.watched_core import STEP_S, WatchedCore


def prompt(seed: int, length: int) -> list[int]:
    return [10 + (seed * 131 + i * 17) % 900 for i in range(length)]


def test_a_request_alone() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 10), 5))
    causes = core.causes("a")
    assert causes["prefill"] == pytest.approx(STEP_S)
    assert causes["decode"] == pytest.approx(4 * STEP_S)
    assert core.unattributed("a") < 1e-9
    view = core.explain("a")
    assert (view["num_prompt_tokens"], view["num_output_tokens"], view["finish_reason"]) == (10, 5, "length")
    assert view["phases_ms"]["forward"] > 0


def test_the_running_limit_is_named_and_shared_by_those_behind() -> None:
    core = WatchedCore(max_num_seqs=1)
    core.run(*(make_request(name, prompt(i, 5), 4) for i, name in enumerate("abc")))
    for name in "bc":
        causes = core.causes(name)
        waited = sum(seconds for cause, seconds in causes.items() if cause.startswith("waiting_"))
        assert causes["waiting_running_limit"] == pytest.approx(waited, abs=2 * STEP_S), causes
        assert core.unattributed(name) < 1e-9
    assert core.causes("c")["waiting_running_limit"] > core.causes("b")["waiting_running_limit"]


def test_the_token_budget_is_named() -> None:
    core = WatchedCore(max_num_batched_tokens=8, num_kv_blocks=129)
    core.run(make_request("long", prompt(1, 64), 1), make_request("next", prompt(2, 8), 1))
    assert core.causes("next")["waiting_token_budget"] >= 7 * STEP_S
    steps = core.recorder.steps
    assert steps[0].head_reason == "token_budget"


def test_missing_blocks_are_named() -> None:
    core = WatchedCore(num_kv_blocks=17, max_model_len=48)
    core.run(make_request("big", prompt(1, 40), 6), make_request("next", prompt(2, 40), 2))
    assert core.causes("next")["waiting_no_blocks"] >= 4 * STEP_S


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_names_the_beneficiary(depth: int) -> None:
    core = WatchedCore(num_kv_blocks=17, max_model_len=64, watermark=0.0, pipeline_depth=depth)
    core.run(make_request("old", prompt(1, 28), 30), make_request("new", prompt(2, 28), 30))
    view = core.explain("new")
    assert [(p["cause"], p["for"]) for p in view["preemptions"]][:1] == [("no_blocks", "old")]
    causes = core.causes("new")
    assert causes["preempted"] > STEP_S
    assert causes["recompute"] >= STEP_S / 2
    assert core.unattributed("new") < 1e-9
    assert core.unattributed("old") < 1e-9


def test_somebody_more_urgent_is_named() -> None:
    core = WatchedCore(max_num_seqs=1, scheduling_policy="priority")
    core.add(make_request("first", prompt(1, 6), 4))
    core.step(2)
    core.add(make_request("patient", prompt(2, 6), 4, priority=5, arrival_time=1.0))
    core.step()
    core.add(make_request("urgent", prompt(3, 6), 20, priority=-5, arrival_time=2.0))
    core.step(12)
    assert core.core.scheduler.make_stats().waiting_reasons == {"priority": 1}
    core.run()
    causes = core.causes("patient")
    assert causes["waiting_running_limit"] >= STEP_S
    assert causes["waiting_priority"] >= 18 * STEP_S
    assert "waiting_priority" not in core.causes("urgent")
    assert core.unattributed("patient") < 1e-9


def test_nobody_is_overtaken_by_an_earlier_one() -> None:
    core = WatchedCore(max_num_seqs=1, scheduling_policy="priority")
    core.run(make_request("old", prompt(1, 6), 9, priority=-1), make_request("new", prompt(2, 6), 2, priority=1))
    assert "waiting_priority" not in core.causes("new")


def test_sleep_is_named() -> None:
    core = WatchedCore(max_num_seqs=1)
    core.add(make_request("a", prompt(1, 6), 20), make_request("b", prompt(2, 6), 4))
    core.step(4)
    core.core.perform(Sleep(level=1))
    core.clock.advance(3.0)
    assert core.core.scheduler.make_stats().waiting_reasons == {"drain": 2}
    core.core.perform(Wake())
    core.run()
    assert core.causes("b")["waiting_drain"] == pytest.approx(3.0, abs=2 * STEP_S)
    assert core.causes("a")["preempted"] == pytest.approx(3.0, abs=2 * STEP_S)
    assert core.explain("a")["preemptions"][0]["cause"] == "drain"
    assert core.unattributed("a") < 1e-9 and core.unattributed("b") < 1e-9


def test_every_reason_has_words() -> None:
    for reason in WaitReason:
        assert f"waiting_{reason.value}" in CAUSES
    running = {"token_budget", "input_budget", "no_blocks", "throttled", "steps_in_flight", "drain"}
    assert {cause for cause in CAUSES if cause.startswith("not_granted_")} == {f"not_granted_{r}" for r in running}


def test_prompts_held_back_for_streams_are_named() -> None:
    core = WatchedCore(num_kv_blocks=129)
    core.add(make_request("stream", prompt(1, 4), 30))
    core.step(2)
    plain = core.core.scheduler.schedule
    core.core.scheduler.schedule = lambda now: plain(now, throttle_prefills=core.clock.monotonic() < 100.1)  # type: ignore[method-assign]
    core.run(make_request("prompt", prompt(2, 12), 1))
    assert core.causes("prompt")["waiting_throttled"] >= 5 * STEP_S


def test_blocks_behind_a_fence_are_named_for_those_who_run() -> None:
    named = set()
    for seed in range(8):
        core = WatchedCore(num_kv_blocks=17, max_model_len=64, watermark=0.0, pipeline_depth=3)
        core.run(*(make_request(f"r{i}", prompt(seed + i, 12 + seed), 30) for i in range(3)))
        named |= {cause for i in range(3) for cause in core.causes(f"r{i}")}
    assert "not_granted_no_blocks" in named


def test_a_step_that_is_run_again_is_named_for_those_left_out() -> None:
    core = WatchedCore(faults=FaultPlan(fail_forward=frozenset({3})))
    core.run(*(make_request(f"r{i}", prompt(i, 6), 8) for i in range(4)))
    assert any("not_granted_drain" in core.causes(f"r{i}") for i in range(4))
    assert all(core.unattributed(f"r{i}") < 1e-9 for i in range(4))


def test_lifetimes_of_blocks_are_measured_when_asked() -> None:
    core = WatchedCore(num_kv_blocks=17, max_model_len=64, kv_block_sample=1.0)
    core.run(make_request("a", prompt(1, 17), 1))
    core.clock.advance(2.0)
    core.run(make_request("b", prompt(1, 17), 1))
    core.clock.advance(1.0)
    core.run(make_request("c", prompt(2, 60), 4))
    residency = core.recorder.residency
    assert residency.lifetime.count == residency.idle_before_evict.count == 4
    assert residency.lifetime.sum == pytest.approx(4 * 3.0, abs=1.0)
    assert residency.reuse_gap.sum == pytest.approx(4 * 2.0, abs=1.0)
    assert set(core.core.perform(_query("stats"))["histograms"]) >= {"kv_block_lifetime", "step_tokens"}
    assert WatchedCore().core.perform(_query("stats"))["histograms"].keys() == {"step_tokens"}


def test_states_of_requests() -> None:
    core = WatchedCore(num_kv_blocks=17, max_model_len=64, watermark=0.0, max_num_seqs=2)
    core.add(make_request("old", prompt(1, 28), 30), make_request("new", prompt(2, 28), 30))
    core.add(make_request("next", prompt(3, 8), 2))
    seen: dict[str, list[str]] = {}
    while core.core.has_work:
        core.step()
        for one in core.core.perform(_query("requests")):
            states = seen.setdefault(one["request_id"], [])
            if one["state"] not in states[-1:]:
                states.append(one["state"])
            assert bool(one["waiting"]) == (one["state"] in ("waiting", "preempted"))
    assert seen["old"] == ["running", "finished"]
    assert seen["new"][:3] == ["running", "preempted", "running"]
    assert seen["next"] == ["waiting", "running", "finished"]


def test_a_failed_step_is_named() -> None:
    core = WatchedCore(faults=FaultPlan(fail_forward=frozenset({3})))
    core.run(make_request("a", prompt(1, 6), 8), make_request("b", prompt(2, 6), 8))
    assert core.causes("a")["failed_step"] >= STEP_S
    assert core.unattributed("a") < 1e-9


def test_a_slow_step_shows_where_it_was_slow() -> None:
    core = WatchedCore(faults=FaultPlan(slow_s={4: 0.5}))
    core.run(make_request("a", prompt(1, 6), 10))
    assert core.causes("a")["decode"] == pytest.approx(9 * STEP_S + 0.5, abs=0.005)
    assert sum(core.explain("a")["phases_ms"].values()) == pytest.approx(1e3 * (10 * STEP_S + 0.5), abs=15)


def test_prompts_of_others_are_named() -> None:
    core = WatchedCore(max_num_batched_tokens=16, num_kv_blocks=129)
    core.add(make_request("stream", prompt(1, 4), 30))
    core.step(3)
    core.run(make_request("long", prompt(2, 100), 1))
    assert core.causes("stream")["decode_beside_prefill"] >= 5 * STEP_S


def test_a_compiling_grammar_is_named() -> None:
    core = WatchedCore(grammar=FakeGrammar(1000, looks=6))
    core.add(make_request("plain", prompt(1, 6), 30))
    core.step(2)
    wish = {"structured_outputs": StructuredOutputParams(json_object=True)}
    core.run(make_request("strict", prompt(2, 6), 4, sampling=wish))
    assert core.causes("strict")["waiting_grammar"] >= 4 * STEP_S
    assert core.unattributed("strict") < 1e-9


def test_kv_on_its_way_is_named() -> None:
    hits = FakeHits(share=1.0, undecided=1.0, is_async=1.0, fates=("good",), max_steps=5)
    core = WatchedCore(connector=FakeConnector(3, hits), worker_connector=FakeWorkerConnector())
    core.run(*(make_request(f"r{i}", prompt(i, 40), 3) for i in range(6)))
    views = [core.explain(f"r{i}") for i in range(6)]
    causes = [core.causes(f"r{i}") for i in range(6)]
    assert any(view["prefix"]["external_hit"] for view in views)
    assert any("waiting_remote_kvs" in found for found in causes)
    assert any("waiting_external_hit" in found for found in causes)
    assert all(core.unattributed(f"r{i}") < 1e-9 for i in range(6))


def test_an_abort_ends_the_timeline() -> None:
    core = WatchedCore()
    core.add(make_request("a", prompt(1, 6), 50))
    core.step(5)
    core.core.abort_soon(["a"])
    core.step()
    view = core.explain("a")
    assert view["finish_reason"] == FinishReason.ABORT.value
    assert core.unattributed("a") < 1e-9


def test_steps_say_what_they_did() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 10), 3), make_request("b", prompt(2, 6), 2))
    first = core.core.perform(_query("steps"))[0]
    assert first["granted"] == {"a": 10, "b": 6}
    assert first["admitted"] == ["a", "b"]
    assert first["chunks"] == {"a": 10, "b": 6}
    assert first["blocks"]["taken"] == 5
    assert first["blocks"]["cached"] == 3
    assert set(first["phases_ms"]) == {"schedule", "prepare", "forward", "sample", "update", "output"}
    assert first["graph_mode"]
    assert [s["step"] for s in core.core.perform(_query("steps", "0"))] == [1, 2]
    assert {r["request_id"] for r in core.core.perform(_query("requests"))} == {"a", "b"}


def _query(topic: str, argument: str | None = None):
    from headrace.messages.requests import Query

    return Query(topic=topic, argument=argument)


# Prefix misses. Blocks have 4 tokens.


def miss(core: WatchedCore, request_id: str) -> dict[str, object]:
    return core.explain(request_id)["prefix"].get("miss", {})


def test_never_seen_and_full_hit() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 17), 1))
    assert miss(core, "a") == {"block": 0, "first_token": 0, "reason": "never_seen"}
    core.run(make_request("b", prompt(1, 17), 1))
    assert core.explain("b")["prefix"]["local_hit"] == 16
    assert miss(core, "b") == {}


def test_text_differs() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 17), 1))
    changed = prompt(1, 17)
    changed[10] = 9
    core.run(make_request("b", changed, 1))
    assert core.explain("b")["prefix"]["local_hit"] == 8
    assert miss(core, "b") == {"block": 2, "first_token": 8, "reason": "text_differs", "token": 10}


def test_evicted() -> None:
    core = WatchedCore(num_kv_blocks=17, max_model_len=64)
    core.run(make_request("a", prompt(1, 17), 1))
    core.run(make_request("b", prompt(2, 56), 4))
    evicting = next(s.step_id for s in core.recorder.steps if s.blocks[2])
    core.run(make_request("c", prompt(1, 17), 1))
    found = miss(core, "c")
    assert found["reason"] == "evicted"
    assert evicting <= int(str(found["step"])) < core.recorder.step_id


def test_cleared() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 17), 1))
    core.core.perform(ResetPrefixCache())
    core.run(make_request("b", prompt(1, 17), 1))
    assert miss(core, "b")["reason"] == "cleared"


def test_another_adapter() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 17), 1, lora_name="poet"))
    core.run(make_request("b", prompt(1, 17), 1))
    assert miss(core, "b") == {"block": 0, "first_token": 0, "reason": "different_adapter", "other": "poet"}


def test_another_salt_was_never_seen_unless_allowed() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 17), 1, cache_salt="alice"))
    core.run(make_request("b", prompt(1, 17), 1, cache_salt="bob"))
    core.run(make_request("c", prompt(1, 17), 1))
    assert miss(core, "b")["reason"] == miss(core, "c")["reason"] == "never_seen"
    open_core = WatchedCore(explain_across_salts=True)
    open_core.run(make_request("a", prompt(1, 17), 1, cache_salt="alice"))
    open_core.run(make_request("b", prompt(1, 17), 1, cache_salt="bob"))
    assert miss(open_core, "b")["reason"] == "different_salt"


def test_left_the_index() -> None:
    core = WatchedCore(num_kv_blocks=17, max_model_len=64)
    core.recorder.index._capacity = 3
    core.run(make_request("a", prompt(1, 17), 1))
    core.run(make_request("b", prompt(2, 60), 1))
    core.run(make_request("c", prompt(1, 17), 1))
    assert miss(core, "c")["reason"] == "left_index"


def test_not_looked_up() -> None:
    core = WatchedCore()
    core.run(make_request("a", prompt(1, 17), 1, sampling={"prompt_logprobs": 1}))
    assert miss(core, "a") == {"reason": "prompt_logprobs"}
    off = WatchedCore(enable_prefix_caching=False)
    off.run(make_request("a", prompt(1, 17), 1))
    assert miss(off, "a") == {"reason": "caching_off"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_hundred_mixed_requests_are_attributed(depth: int) -> None:
    random = Random(depth)
    core = WatchedCore(num_kv_blocks=40, max_num_seqs=6, max_num_batched_tokens=32, pipeline_depth=depth)
    names = [f"r{i}" for i in range(200)]
    for index, name in enumerate(names):
        shared = prompt(index % 5, random.randint(0, 40))
        core.add(make_request(name, shared + prompt(index, random.randint(1, 40)), random.randint(1, 30)))
        core.step(random.randint(0, 3))
        if random.random() < 0.05:
            core.core.abort_soon([random.choice(names[: index + 1])])
    core.run()
    shares = [1.0 - core.unattributed(name) for name in names]
    assert min(shares) >= 0.99, [n for n, s in zip(names, shares, strict=True) if s < 0.99]
    assert sum(len(core.explain(name)["preemptions"]) for name in names) > 0


def test_memory_is_bounded() -> None:
    core = WatchedCore()
    recorder = core.recorder
    recorder._max_steps, recorder._max_finished = 50, 10
    core.run(*(make_request(f"r{i}", prompt(i, 4), 20) for i in range(60)))
    assert len(recorder.steps) < 100
    assert len(recorder.finished) == 10
    assert not recorder.live
    assert all(log.record is None and log.chain is None for log in recorder.finished.values())
    assert isinstance(recorder, FlightRecorder)
