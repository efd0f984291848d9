"""The page on parameters over HTTP: the same values pass and are refused as in Python, streamed and not."""

from __future__ import annotations

import pytest

from headrace.entrypoints.openai.protocol import CompletionRequest
from tests.frontend.test_parameters_page import CASES
from tests.http.conftest import StartService

NAMES = sorted({name for name, _, _ in CASES})


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("name", NAMES)
async def test_parameter(start_service: StartService, monkeypatch: pytest.MonkeyPatch, name: str, stream: str) -> None:
    """P12."""
    assert name in CompletionRequest.__struct_fields__
    monkeypatch.setattr("tests.http_service.MAX_LEN", 64)
    monkeypatch.setattr("tests.http_service.VOCAB", 1000)
    service = await start_service(settings={"max_logprobs": 5})
    cases = [(value, accepted) for known, value, accepted in CASES if known == name]
    for value, accepted in [*cases, ("null", True)]:
        if name == "prompt_logprobs" and stream == "true":
            accepted = value == "null"
        body = f'{{"prompt": [5, 6, 7, 8], "stream": {stream}, "{name}": {value}}}'
        reply = await service.http.post("/v1/completions", content=body)
        assert reply.status_code == (200 if accepted else 400), (value, reply.text)
        if not accepted:
            error = reply.json()["error"]
            # JSON has no such numbers, so the body has no fields either.
            assert error["code"] == "invalid_json" if value in ("NaN", "Infinity") or "NaN" in value else True
            assert (error["param"] or name).startswith(name), (value, error)
    assert service.llm.num_requests == 0
