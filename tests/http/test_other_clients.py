"""Other people's clients against the server: LiteLLM with its offline cost map, and Instructor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel

from tests.http_service import MODEL
from tests.simulated_service import SimulatedService, threaded_service

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


class Choice(BaseModel):
    """Short whatever is sampled."""

    colour: Literal["red", "blue"]
    size: Literal["s", "l"]


@pytest.fixture(scope="module")
def service() -> Iterator[SimulatedService]:
    with threaded_service({"max_model_len": 4096, "num_kv_blocks": 2000}) as running:
        yield running


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """Imported late, since it fetches its prices as it is imported, unless told not to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        yield litellm


def test_litellm(service: SimulatedService, litellm: Any) -> None:
    where = {"model": f"openai/{MODEL}", "api_base": f"{service.url}/v1", "api_key": "none", "max_tokens": 8}
    whole = litellm.completion(messages=MESSAGES, seed=1, **where)
    assert whole.usage.completion_tokens == 8
    pieces = list(litellm.completion(messages=MESSAGES, seed=1, stream=True, **where))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=MESSAGES, temperature=5, **where)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**where, "model": "openai/other"})


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(service: SimulatedService, mode: str) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as inner:
        client = instructor.from_openai(inner, mode=getattr(instructor.Mode, mode))
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=Choice, max_tokens=400, max_retries=0
        )
    assert isinstance(answer, Choice)
