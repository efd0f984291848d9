"""The page on parameters is true: every value in its table is tried."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import InvalidRequestError
from headrace.frontend.input_processor import InputProcessor, PromptTokens
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import RequestLimits
from headrace.messages.sampling_params import SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parameters.md"
LIMITS = RequestLimits(max_model_len=64, vocab_size=1000, kv_cache_tokens=64, max_logprobs=5)


def read_cases() -> list[tuple[str, str, bool]]:
    """(parameter, value as JSON, accepted) of the first table; null counts as accepted everywhere."""
    cases = []
    table = PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or not cells[0].startswith("`"):
            continue
        name = cells[0].strip("`")
        for cell, accepted in ((cells[2], True), (cells[3], False)):
            cases += [(name, value, accepted) for value in re.findall(r"`([^`]+)`", cell)]
    return cases


CASES = read_cases()


def as_python(name: str, value: str) -> Any:
    """The value as it reaches `SamplingParams`; the keys of a JSON object are text, those of a bias are ids."""
    parsed = json.loads(value)
    return {int(key): bias for key, bias in parsed.items()} if name == "logit_bias" else parsed


def test_the_page_covers_every_number_that_sampling_takes() -> None:
    named = {name for name, _, _ in CASES}
    text_only = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize"}
    assert named == set(SamplingParams.__struct_fields__) - text_only - {"structured_outputs", "output_kind"}


@pytest.mark.parametrize(("name", "value", "accepted"), CASES)
def test_value(name: str, value: str, accepted: bool, byte_level: Tokenizer) -> None:
    """P12."""
    source = InputProcessor(byte_level, LIMITS, seed=0, id_suffix="t")

    def submit() -> None:
        params = SamplingParams(**{name: as_python(name, value)})
        source.make_request(PromptTokens([5, 6, 7, 8]), params, external_id="x", arrival=0.0)

    if accepted:
        submit()
        return
    with pytest.raises(InvalidRequestError) as caught:
        submit()
    assert caught.value.param == name
