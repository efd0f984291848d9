"""``LLM`` on the real model, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.base.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0}
    with LLM(str(smollm2_gguf), num_kv_blocks=80, enable_prefix_caching=True, **settings) as made:
        yield made


@pytest.mark.slow
def test_importing_the_frontend_imports_no_torch() -> None:
    code = (
        "import sys, headrace, headrace.frontend.async_llm, headrace.frontend.sync_engine\n"
        "from headrace import LLM, AsyncLLM, SamplingParams, RequestOutput\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_the_forms_of_a_prompt_are_one(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The capital of France is"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    answers = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms[:1]]
    answers += llm.generate(forms, GREEDY)
    assert len(answers) == 5
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert {answer.prompt for answer in answers} == {text, None}
    assert "Paris" in answers[0].outputs[0].text
    assert answers[0].finished and answers[0].outputs[0].finish_reason == "length"
    assert "Prompts" in capsys.readouterr().err, "a progress bar is drawn"


@pytest.mark.slow
def test_chats_are_those_of_the_goldens(llm: LLM, goldens: list[dict[str, Any]]) -> None:
    """B059: the same ids by messages and by the rendered text."""
    chat = next(golden for golden in goldens if golden.get("messages") and len(golden["prompt_ids"]) < 60)
    by_messages = llm.chat(chat["messages"], GREEDY, use_tqdm=False)[0]
    assert by_messages.prompt_token_ids == chat["prompt_ids"]
    assert by_messages.prompt == chat["text_prompt"]
    by_text = llm.generate(chat["text_prompt"], GREEDY, use_tqdm=False)[0]
    assert by_text.prompt_token_ids == chat["prompt_ids"]
    assert by_text.outputs[0].token_ids == by_messages.outputs[0].token_ids
    assert len(llm.chat([chat["messages"]] * 2, GREEDY, use_tqdm=False)) == 2


@pytest.mark.slow
def test_a_list_with_a_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    """B083."""
    with pytest.raises(ValueError, match="maximum context length of 256"):
        llm.generate(["ok", "ok", [5] * 256, "ok"], GREEDY, use_tqdm=False)
    assert len(llm.generate(["ok"], GREEDY, use_tqdm=False)) == 1
    assert llm.reset_prefix_cache()


def test_unknown_settings_and_models_are_named() -> None:
    with pytest.raises(ConfigError, match="max_model_length"):
        LLM("smollm2-135m", max_model_length=5)
