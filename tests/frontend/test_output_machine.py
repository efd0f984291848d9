"""Any order of steps, aborts and takes: each answer ends once and its deltas join to its text."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.frontend.fan_out import RequestGroup
from headrace.frontend.input_processor import InputProcessor, PromptTokens
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.validation import RequestLimits
from headrace.messages.outputs import EngineCoreOutput, FinishReason, RequestTimes
from headrace.messages.request_output import RequestOutput
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams

from .conftest import make_byte_level

TOKENIZER = make_byte_level()
LIMITS = RequestLimits(max_model_len=10_000, vocab_size=TOKENIZER.num_tokens, kv_cache_tokens=10_000)
STOPS = ["", "e", "he", "th!"]


class Watch:
    """An observer that holds the promises made to it."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}

    def request_started(self, request_id: str, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        assert request_id not in self.live
        self.live[request_id] = 0

    def tokens_arrived(self, request_id: str, num_tokens: int, arrival: float, now: float, num_cached: int) -> None:
        self.live[request_id] += num_tokens

    def request_finished(self, request_id: str, reason: str, arrival: float, now: float, times: RequestTimes) -> None:
        del self.live[request_id]

    def request_rejected(self, reason: str) -> None:
        raise AssertionError(reason)

    def stats_arrived(self, stats: object) -> None:
        raise AssertionError(stats)


class Consumer:
    """What one consumer has seen of a group."""

    def __init__(self, group: RequestGroup, kind: RequestOutputKind, stop: str) -> None:
        self.group, self.kind, self.stop = group, kind, stop
        self.sent: list[list[int]] = [[] for _ in group.answers]
        self.texts = [""] * len(group.answers)
        self.ids: list[list[int]] = [[] for _ in group.answers]
        self.ends: list[str | None] = [None] * len(group.answers)
        self.done = False

    def see(self, output: RequestOutput) -> None:
        assert not self.done
        self.done = output.finished
        for part in output.outputs:
            if self.kind is RequestOutputKind.DELTA:
                assert self.ends[part.index] is None, "nothing comes after the end"
                self.texts[part.index] += part.text
                self.ids[part.index] += part.token_ids
            else:
                assert part.text.startswith(self.texts[part.index])
                self.texts[part.index], self.ids[part.index] = part.text, part.token_ids
            self.ends[part.index] = part.finish_reason
        if output.finished:
            assert None not in self.ends
            self.check_texts()

    def check_texts(self) -> None:
        for text, ids, sent, end in zip(self.texts, self.ids, self.sent, self.ends, strict=True):
            assert ids == sent[: len(ids)]
            whole = TOKENIZER.decode([*self.group.prompt_token_ids, *ids])[len(PROMPT_TEXT) :]
            if end == "stop" and self.stop:
                assert text == whole[: whole.index(self.stop)]
            else:
                assert ids == sent and text == whole


PROMPT_TEXT = "the "
PROMPT = TOKENIZER.encode(PROMPT_TEXT)
# Pieces of the stop strings, whole words, a special token and the bytes of a character.
TOKENS = [
    2,
    *TOKENIZER.encode("t"),
    *TOKENIZER.encode("h"),
    *TOKENIZER.encode(" the quick one"),
    *TOKENIZER.encode("\U0001f600"),
]


class OutputMachine(RuleBasedStateMachine):
    """The core's side is played; the consumers' side is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Watch()
        self.processor = OutputProcessor(self.watch)
        self.source = InputProcessor(TOKENIZER, LIMITS, seed=0, id_suffix="t")
        self.consumers: list[Consumer] = []
        self.in_core: dict[str, tuple[Consumer, int]] = {}

    @rule(n=st.integers(1, 3), kind=st.sampled_from(RequestOutputKind), stop=st.sampled_from(STOPS))
    def add(self, n: int, kind: RequestOutputKind, stop: str) -> None:
        params = SamplingParams(n=n, output_kind=kind, stop=stop or None, max_tokens=None, ignore_eos=True)  # type: ignore[arg-type]
        request = self.source.make_request(PromptTokens(PROMPT), params, external_id="x", arrival=1.0)
        consumer = Consumer(RequestGroup("x", request, None, TOKENIZER), kind, stop)
        self.processor.add(consumer.group)
        self.consumers.append(consumer)
        for index, child in enumerate(consumer.group.children):
            self.in_core[child.request_id] = (consumer, index)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        outputs = []
        for request_id, (consumer, index) in list(self.in_core.items()):
            tokens = data.draw(st.lists(st.sampled_from(TOKENS), max_size=4))
            ends = data.draw(st.sampled_from([*[None] * 7, FinishReason.LENGTH]))
            outputs.append(EngineCoreOutput(request_id=request_id, new_token_ids=tokens, finish_reason=ends))
            consumer.sent[index] += tokens
            if ends is not None:
                del self.in_core[request_id]
        for request_id in self.processor.process(outputs, 2.0):
            del self.in_core[request_id]

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = [consumer for consumer in self.consumers if not consumer.group.finished]
        if len(running) < 3:
            return
        consumer = data.draw(st.sampled_from(running))
        ended = self.processor.end(consumer.group, FinishReason.ABORT, 3.0)
        assert self.processor.end(consumer.group, FinishReason.ABORT, 3.0) == []
        for request_id in ended:
            del self.in_core[request_id]
        assert consumer.group.finished

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if not self.consumers:
            return
        consumer = data.draw(st.sampled_from(self.consumers))
        output = consumer.group.take()
        if output is not None:
            consumer.see(output)
        assert consumer.group.take() is None

    @invariant()
    def counts_agree(self) -> None:
        self.processor.check_invariants()
        live = {i for i in self.in_core if i in self.watch.live}
        assert set(self.watch.live) == live == set(self.in_core)

    def teardown(self) -> None:
        for consumer in self.consumers:
            self.processor.end(consumer.group, FinishReason.ABORT, 4.0)
            output = consumer.group.take()
            if output is not None:
                consumer.see(output)
            assert consumer.done
        assert self.processor.num_requests == 0 and not self.watch.live


OutputMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestOutput = pytest.mark.slow(OutputMachine.TestCase)
