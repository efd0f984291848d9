"""What clients send stays between them and the model: no log line and no refusal holds it, whatever goes wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.http_service import MODEL
from tests.simulated_service import start_simulated

MARK = "SECRETMARK"
KEY = "SECRETKEY"
MESSAGES = [{"role": "user", "content": MARK}]
TOOL = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {"type": MARK}}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARK}),
    ("/v1/completions", {"prompt": MARK * 100}),
    ("/v1/completions", {"prompt": MARK, "model": MARK}),
    ("/v1/completions", {"prompt": MARK, "temperature": MARK}),
    ("/v1/completions", {"prompt": MARK, "suffix": MARK}),
    ("/v1/completions", {"prompt": {MARK: MARK}}),
    ("/v1/completions", {"prompt": MARK, "stop": [MARK] * 100}),
    ("/v1/completions", {"prompt": MARK, "logit_bias": {MARK: 1}}),
    ("/v1/completions", {"prompt": MARK, "structured_outputs": {"regex": f"({MARK}"}}),
    ("/v1/completions", {"prompt": MARK, "structured_outputs": {"choice": [MARK]}}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": {MARK: 1}}]}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": {"type": MARK}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "chat_template": MARK}),
    ("/v1/responses", {"input": MARK, "previous_response_id": MARK}),
    ("/v1/responses", {"input": [{"type": MARK}]}),
    ("/tokenize", {"prompt": MARK}),
    ("/inference/v1/generate", {"token_ids": [MARK]}),
]


async def test_nothing_of_a_request_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    service = await start_simulated(api_key=(KEY,))
    try:
        for number, (path, body) in enumerate(REQUESTS):
            # Some of them fail inside the engine too.
            service.llm.faults[f"cmpl-r{number}"] = {"phase": "forward", "repeat": "always"}
            headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": f"r{number}"}
            reply = await service.http.post(path, json={"model": MODEL, "max_tokens": 4, **body}, headers=headers)
            if reply.status_code != 200:
                assert MARK not in reply.json()["error"]["message"], (path, body)
                assert KEY not in reply.text
            broken = json.dumps(body)[:-1].encode()
            reply = await service.http.post(path, content=broken, headers=headers)
            assert reply.status_code == 400
            assert MARK not in reply.text
        reply = await service.http.post("/v1/completions", json={}, headers={"Authorization": f"Bearer {KEY}x"})
        assert reply.status_code == 401
    finally:
        await service.end()
    formatter = logging.Formatter()
    for record in caplog.records:
        line = formatter.format(record)
        assert MARK not in line
        assert KEY not in line
