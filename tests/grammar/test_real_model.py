"""Grammars on the real model: its vocabulary token by token, and answers that hold to what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import InvalidRequestError
from headrace.core.grammar_backend import GrammarTokenizer, TokenizerSource
from headrace.entrypoints.async_engine import make_tokenizer
from headrace.entrypoints.llm import LLM
from headrace.messages.request_output import RequestOutput
from headrace.messages.sampling_params import SamplingParams, StructuredOutputParams
from headrace.model_files.tokenizer import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blué"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["Tell me about Ada:", "Tell me about Bob:", "A person:"]


def test_each_token_stands_for_the_bytes_that_the_detokenizer_gives(smollm2_gguf: Path) -> None:
    loaded = load_tokenizer(smollm2_gguf)
    ours = make_tokenizer(loaded)
    seen = GrammarTokenizer(TokenizerSource.from_loaded(loaded), ours.num_tokens + 64)
    assert seen.eos_token_ids >= set(ours.eos_token_ids) != set()
    special = set(loaded.tokenizer.get_added_tokens_decoder())
    for token_id in range(ours.num_tokens):
        expected = b"" if token_id in special else ours.token_bytes[token_id]
        assert seen.token_bytes(token_id) == expected or expected == b"\xff", token_id


def make(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), max_model_len=512, kv_cache_memory=64 << 20, **settings)


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with make(smollm2_gguf, pipeline_depth=2) as made:
        yield made


def params(temperature: float = 0.0, **constraint: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=5,
        max_tokens=80,
        structured_outputs=StructuredOutputParams(**constraint),
        n=2 if temperature else 1,
    )


def ask(llm: LLM) -> list[RequestOutput]:
    """Constrained requests of each kind and free ones beside them, in one batch."""
    person = json.dumps(PERSON)
    asked = [
        params(json=person),
        params(1.0, json=person),
        params(1.0, choice=("positive", "negative", "né")),
        params(1.0, regex="[A-Z][a-z]{2,6} [0-9]{3}"),
        params(json_object=True),
        SamplingParams(temperature=0, max_tokens=20),
    ]
    return llm.generate([PROMPTS[i % 3] for i in range(len(asked))], asked, use_tqdm=False)


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[answer.text for answer in output.outputs] for output in outputs]


def test_answers_hold_to_what_was_asked(llm: LLM) -> None:
    outputs = ask(llm)
    for answer in [*outputs[0].outputs, *outputs[1].outputs]:
        if answer.finish_reason == "stop":
            value = json.loads(answer.text)
            assert set(value) == {"name", "age", "tags"} and 0 <= value["age"] <= 150 and len(value["tags"]) == 2
            assert set(value["tags"]) <= {"red", "blué"} and len(value["name"]) <= 12
    assert all(answer.text in ("positive", "negative", "né") for answer in outputs[2].outputs)
    assert all(re.fullmatch("[A-Z][a-z]{2,6} [0-9]{3}", answer.text) for answer in outputs[3].outputs)
    assert outputs[4].outputs[0].text.lstrip().startswith("{")
    assert {answer.finish_reason for output in outputs[2:4] for answer in output.outputs} == {"stop"}
    assert texts(ask(llm)) == texts(outputs), "the second time the prompts come from the prefix cache"


def test_depth_does_not_change_them(llm: LLM, smollm2_gguf: Path) -> None:
    with make(smollm2_gguf, pipeline_depth=1, enable_prefix_caching=False) as other:
        assert texts(ask(other)) == texts(ask(llm))


def test_stop_strings_cut_within_the_constraint(llm: LLM) -> None:
    stopped = SamplingParams(
        temperature=0, max_tokens=40, stop=("-",), structured_outputs=StructuredOutputParams(regex="[a-c]{4}-[0-9]{4}")
    )
    (output,) = llm.generate("Code:", stopped, use_tqdm=False)
    assert re.fullmatch("[a-c]{4}", output.outputs[0].text)
    assert output.outputs[0].stop_reason == "-"


@pytest.mark.parametrize(
    "constraint", [{"json": '{"$ref": "#"}'}, {"regex": "["}, {"json": '{"not": {}}'}, {"json": "5"}, {}]
)
def test_the_same_things_are_refused_as_over_http(llm: LLM, constraint: dict[str, Any]) -> None:
    """B064."""
    with pytest.raises(InvalidRequestError):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputParams(**constraint)), use_tqdm=False)
    (output,) = llm.generate("1, 2,", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
