"""The synchronous engine over a real core with simulated tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import EngineDeadError, InvalidRequestError
from headrace.core.inproc_client import InlineCore
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.sync_engine import SyncEngine
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.request_output import RequestOutput
from headrace.messages.sampling_params import SamplingParams
from headrace.testing.engine_config import make_architecture, make_engine_config

EXECUTOR = "headrace.testing.simulated_executor:make_executor"


def ignore(output: RequestOutput) -> None:
    """Nobody watches."""


@pytest.fixture
def make(byte_level: Tokenizer) -> Iterator[Any]:
    made: list[SyncEngine] = []

    def build(**settings: Any) -> SyncEngine:
        config = make_engine_config(make_architecture(eos_token_ids=(999,)), **settings)
        core = InlineCore(config, EXECUTOR, settings.pop("options", None))
        template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
        made.append(SyncEngine(core, config, byte_level, chat_template=template))
        return made[-1]

    yield build
    for engine in made:
        engine.shutdown()


def test_results_come_in_the_order_of_prompts(make: Any) -> None:
    engine = make()
    prompts = [[5] * (30 - place) for place in range(20)]
    params = [SamplingParams(max_tokens=1 + place % 7, ignore_eos=True) for place in range(20)]
    finished: list[str] = []
    outputs = engine.run(prompts, params, lambda output: finished.append(output.request_id))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + place % 7 for place in range(20)]
    assert all(output.finished for output in outputs)
    assert sorted(finished, key=int) == [str(place) for place in range(20)] != finished
    assert engine.run([], None, ignore) == []


def test_seeds_belong_to_requests(make: Any) -> None:
    """B026: the same whatever runs beside; B083's order of choices with n."""
    asked = SamplingParams(seed=11, temperature=0.9, max_tokens=12, n=2, ignore_eos=True)
    other = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)
    engine = make()
    alone = engine.run([[5, 6]], asked, ignore)[0]
    beside = engine.run([[5, 6], [7]], [asked, other], ignore)[0]
    one = engine.run([[5, 6]], SamplingParams(seed=11, temperature=0.9, max_tokens=12, ignore_eos=True), ignore)[0]
    tokens = [answer.token_ids for answer in alone.outputs]
    assert tokens == [answer.token_ids for answer in beside.outputs] and tokens[0] != tokens[1]
    assert one.outputs[0].token_ids == tokens[0]
    assert [answer.index for answer in alone.outputs] == [0, 1]


def test_an_invalid_prompt_leaves_nothing_behind(make: Any) -> None:
    """B083."""
    engine = make()
    with pytest.raises(ValueError) as caught:
        engine.run(["ok", "ok", [5] * 500, "ok"], SamplingParams(max_tokens=4), ignore)
    assert isinstance(caught.value, InvalidRequestError)
    assert len(engine.run(["ok"], SamplingParams(max_tokens=4), ignore)) == 1
    with pytest.raises(InvalidRequestError):
        engine.run(["a", "b"], [SamplingParams()], ignore)


def test_an_interrupt_leaves_nothing_behind(make: Any) -> None:
    engine = make()

    def interrupt(output: RequestOutput) -> None:
        raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 50, 50)]
    with pytest.raises(KeyboardInterrupt):
        engine.run([[5], [6], [7]], params, interrupt)
    assert not engine._core.has_work and engine._processor.num_requests == 0
    assert len(engine.run([[5]], SamplingParams(max_tokens=2), ignore)) == 1


def test_text_stops_and_chats(make: Any) -> None:
    engine = make()
    tokens = engine.run(["Hi"], SamplingParams(max_tokens=40, ignore_eos=True, seed=3), ignore)[0].outputs[0]
    stop = next(text for text in tokens.text.split() if text)
    stopped = engine.run(["Hi"], SamplingParams(max_tokens=40, ignore_eos=True, seed=3, stop=stop), ignore)[0].outputs[
        0
    ]
    assert stopped.text == tokens.text[: tokens.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    prompt = engine.tokenize_chat([{"role": "user", "content": "Hi"}])
    assert engine.run([prompt], SamplingParams(max_tokens=2), ignore)[0].prompt == "Hi"
    assert not engine._core.has_work


def test_a_dead_core_says_why(make: Any) -> None:
    engine = make()
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        engine.run([[5]], SamplingParams(max_tokens=2), ignore)
    engine.shutdown()
