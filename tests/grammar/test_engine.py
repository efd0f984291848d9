"""Grammars in the engine: the tokens are those of an undisturbed run, whatever happens beside and between the steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import ManualClock, SystemClock
from headrace.base.errors import ModelFileError
from headrace.control.grammar.manager import GrammarManager
from headrace.core import grammar_backend
from headrace.core.engine_core import EngineCore
from headrace.core.grammar_backend import (
    GrammarCompilation,
    LLGuidanceCompiler,
    LLGuidanceMatcher,
    TokenizerSource,
)
from headrace.messages.outputs import EngineCoreOutput, FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import GRAMMAR_TOO_COSTLY
from headrace.messages.sampling_params import StructuredOutputParams
from headrace.testing.engine_config import make_architecture, make_engine_config
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor
from tests.grammar.vocabularies import byte_level, source_of

BYTES = byte_level()
VOCAB, MAX_LEN = BYTES.get_vocab_size() + 5, 128
END = BYTES.token_to_id("<end>")
WORD = r"([a-c]{3}-){16,24}[0-9]{2}"

Result = dict[str, tuple[str, EngineCoreOutput]]


def make_core(
    load: Callable[[], TokenizerSource] = lambda: source_of(BYTES, "<end>"), limit_s: float = 30.0, **settings: Any
) -> tuple[EngineCore, GrammarManager]:
    config = make_engine_config(make_architecture(vocab_size=VOCAB), max_model_len=MAX_LEN, **settings)
    clock = ManualClock()
    manager = GrammarManager(LLGuidanceCompiler(load, VOCAB, SystemClock(), limit_s), VOCAB)
    return EngineCore(config, SimulatedExecutor(config, clock=clock), clock, grammar=manager), manager


def ask(request_id: str, params: StructuredOutputParams, **more: Any) -> EngineCoreRequest:
    more.setdefault("max_tokens", 110)
    return make_request(request_id, sampling={"structured_outputs": params}, eos_token_ids=(END,), **more)


def run(core: EngineCore, requests: list[EngineCoreRequest]) -> Result:
    """Run to the end; text and last output of each request."""
    for request in requests:
        core.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, EngineCoreOutput] = {}
    while core.has_work:
        for outputs in core.step().values():
            for output in outputs.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    ends[output.request_id] = output
        core.scheduler.check_invariants()
    return {key: (BYTES.decode(tokens[key]), ends[key]) for key in tokens}


def requests_of(num: int) -> list[EngineCoreRequest]:
    return [ask(f"g{i}", StructuredOutputParams(regex=WORD), prompt=5 + i, seed=i) for i in range(num)]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """Each request alone, one step at a time."""
    return {r.request_id: run(make_core()[0], [r])[r.request_id][0] for r in requests_of(6)}


def check(result: Result, undisturbed: dict[str, str]) -> None:
    for request_id, (text, end) in result.items():
        assert end.finish_reason is FinishReason.STOP, (request_id, end)
        assert text == undisturbed[request_id]
        assert re.fullmatch(WORD, text)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 34}, {"enable_prefix_caching": False}])
def test_depth_and_preemption_leave_the_tokens_alone(
    depth: int, settings: dict[str, Any], undisturbed: dict[str, str]
) -> None:
    core, manager = make_core(pipeline_depth=depth, **settings)
    check(run(core, requests_of(6)), undisturbed)
    assert manager.num_requests == 0
    if "num_kv_blocks" in settings:
        assert core.scheduler.make_stats().num_preemptions > 0, "the case is to have preemptions"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "sample"])
def test_a_step_that_is_run_again_leaves_the_tokens_alone(depth: int, phase: str, undisturbed: dict[str, str]) -> None:
    core, manager = make_core(pipeline_depth=depth)
    culprit = make_request("culprit", 4, 30, fault={"phase": phase, "repeat": "always", "at": 12})
    result = run(core, [*requests_of(4), culprit])
    assert result.pop("culprit")[1].finish_reason is FinishReason.ERROR
    check(result, undisturbed)
    assert manager.num_requests == 0


def test_a_grammar_that_fails_ends_its_request_alone(undisturbed: dict[str, str]) -> None:
    core, manager = make_core(pipeline_depth=2)
    bad = [
        ask("unreadable", StructuredOutputParams(regex="[")),
        ask("unsatisfiable", StructuredOutputParams(json='{"$ref": "#"}')),
    ]
    result = run(core, [*bad, *requests_of(2)])
    for request in bad:
        end = result.pop(request.request_id)[1]
        assert end.finish_reason is FinishReason.ERROR
        assert (end.error or "").startswith("structured_outputs: ")
    check(result, undisturbed)
    assert manager.num_requests == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", ["get_error", "make_matcher", "fill_mask", "accept"])
def test_a_grammar_that_raises_ends_its_request_alone(
    depth: int, method: str, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = StructuredOutputParams(regex="[xyz]{40}")

    def raise_for_it(owner: type, name: str) -> None:
        right = getattr(owner, name)

        def called(self: Any, *arguments: Any) -> Any:
            if getattr(self, "poisoned", False):
                raise ValueError("SECRET")
            return right(self, *arguments)

        monkeypatch.setattr(owner, name, called)

    compiled = LLGuidanceCompiler.compile
    made = GrammarCompilation.make_matcher

    def compile_it(self: LLGuidanceCompiler, params: StructuredOutputParams) -> GrammarCompilation:
        compilation = compiled(self, params)
        compilation.poisoned = params == broken  # type: ignore[attr-defined]
        return compilation

    def make_it(self: GrammarCompilation) -> LLGuidanceMatcher:
        matcher = made(self)
        matcher.poisoned = self.poisoned  # type: ignore[attr-defined]
        return matcher

    monkeypatch.setattr(LLGuidanceCompiler, "compile", compile_it)
    monkeypatch.setattr(GrammarCompilation, "make_matcher", make_it)
    raise_for_it(LLGuidanceMatcher if method in ("fill_mask", "accept") else GrammarCompilation, method)
    core, manager = make_core(pipeline_depth=depth)
    result = run(core, [ask("culprit", broken), *requests_of(3)])
    end = result.pop("culprit")[1]
    assert end.finish_reason is FinishReason.ERROR
    assert "SECRET" not in (end.error or "")
    check(result, undisturbed)
    assert manager.num_requests == 0
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_usable


def test_a_tokenizer_that_cannot_be_loaded_fails_the_requests_that_need_it() -> None:
    def load() -> TokenizerSource:
        return TokenizerSource("not JSON", [END], {})

    result = run(make_core(load)[0], [ask("g", StructuredOutputParams(regex="a")), make_request("free")])
    assert "tokenizer cannot be used" in (result["g"][1].error or "")
    assert result["free"][1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("error", [ModelFileError("/secret/model.gguf: gone"), OSError(2, "gone", "/secret/x")])
def test_a_tokenizer_that_has_gone_is_told_without_its_path(error: Exception) -> None:
    def load() -> TokenizerSource:
        raise error

    result = run(make_core(load)[0], [ask("g", StructuredOutputParams(regex="a")), make_request("free")])
    assert "tokenizer cannot be read" in (result["g"][1].error or "")
    assert "secret" not in (result["g"][1].error or "")
    assert result["free"][1].finish_reason is FinishReason.LENGTH


def test_an_abort_while_the_grammar_is_compiled_leaves_nothing() -> None:
    core, manager = make_core()
    core.add_request(ask("g", StructuredOutputParams(regex="a")))
    core.abort_soon(["g"])
    while core.has_work:
        core.step()
    assert manager.num_requests == 0


def test_a_text_that_ignores_its_end_goes_on_with_it() -> None:
    """B058."""
    request = make_request("g", 4, 9, sampling={"structured_outputs": StructuredOutputParams(choice=("ab",))})
    core, _ = make_core(pipeline_depth=2)
    text, end = run(core, [request])["g"]
    assert end.finish_reason is FinishReason.LENGTH
    assert text == "ab"


def test_a_compilation_that_takes_too_long_counts_as_failed() -> None:
    """B073."""
    clock = ManualClock()
    begun = []
    compiler = LLGuidanceCompiler(lambda: begun.append(1) or source_of(BYTES, "<end>"), VOCAB, clock, 5.0)  # type: ignore[func-returns-value]
    compilation = compiler.compile(StructuredOutputParams(regex="a"))
    wait([compilation.future])
    # As if its thread were still at work.
    compilation.future = type(compilation.future)()
    assert not compilation.done
    clock.advance(5.1)
    assert compilation.done
    assert "longer than 5 s" in (compilation.get_error() or "")
    again = compiler.compile(StructuredOutputParams(regex="a"))
    assert again is not compilation, "what failed is tried anew"
    wait([again.future])
    assert again.done and again.get_error() is None
    assert len(begun) == 1, "the tokenizer is built once"
    assert compiler.compile(StructuredOutputParams(regex="a")) is again, "what is known is not compiled again"


def test_what_the_first_grammar_would_wait_for_can_be_made_before() -> None:
    begun = []
    compiler = LLGuidanceCompiler(lambda: begun.append(1) or source_of(BYTES, "<end>"), VOCAB, SystemClock(), 5.0)  # type: ignore[func-returns-value]
    compiler.prepare()
    compilation = compiler.compile(StructuredOutputParams(json_object=True))
    wait([compilation.future])
    assert compilation.done and compilation.get_error() is None
    assert len(begun) == 1
    broken = LLGuidanceCompiler(lambda: TokenizerSource("not JSON", [END], {}), VOCAB, SystemClock(), 5.0)
    broken.prepare()
    refused = broken.compile(StructuredOutputParams(regex="a"))
    wait([refused.future])
    assert "tokenizer cannot be used" in ((refused.done and refused.get_error()) or "")


class _FailingMatcher:
    def accept(self, token_ids: list[int]) -> str | None:
        return "no"

    def fill_mask(self, words: np.ndarray) -> str | None:
        return "out of fuel"


class _FailingCompilation:
    done = True

    def get_error(self) -> str | None:
        return None

    def make_matcher(self) -> _FailingMatcher:
        return _FailingMatcher()


class _FailingCompiler:
    def compile(self, params: StructuredOutputParams) -> _FailingCompilation:
        return _FailingCompilation()


def test_a_matcher_that_fails_allows_nothing() -> None:
    manager = GrammarManager(_FailingCompiler(), 70)
    request = ask("g", StructuredOutputParams(regex="a"))
    manager.start(request)
    assert manager.is_ready("g") and manager.get_error("g") is None
    core, _ = make_core()
    core.add_request(make_request("other"))
    step = core.scheduler.schedule(0.0)
    masks = manager.make_bitmask(type(step)(**{**_fields(step), "grammar": ["g", "gone"]}))
    assert (masks.request_ids, masks.num_words, masks.bitmask) == (["g"], 3, bytes(12))
    assert manager.accept("g", [1]) == "no"
    manager.forget("g")
    manager.forget("g")
    assert manager.num_requests == 0


def _fields(step: Any) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__struct_fields__}


def test_a_grammar_beyond_a_limit_in_the_middle_of_a_text_says_which(
    undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_backend, "MAX_LEXER_STATES", 600)
    core, manager = make_core(pipeline_depth=2)
    costly = ask("costly", StructuredOutputParams(regex=r"[^q]*[aeiou][^q]{100}z"), max_tokens=MAX_LEN)
    result = run(core, [costly, *requests_of(2)])
    text, end = result.pop("costly")
    assert text, "the case is to fail after the first token"
    assert end.finish_reason is FinishReason.ERROR
    assert GRAMMAR_TOO_COSTLY in (end.error or "")
    assert "states" in (end.error or "")
    check(result, undisturbed)
    assert manager.num_requests == 0
