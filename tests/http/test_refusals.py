"""What bad input gets: 400 with the field named, a short body, nothing echoed, and no harm to others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.entrypoints.openai.app import openapi_document
from headrace.entrypoints.openai.refusals import REFUSALS
from tests.http.conftest import StartService
from tests.http_service import MAX_LEN, MODEL, Service

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"model": MODEL, "prompt": "x", "max_tokens": 2},
    CHAT: {"model": MODEL, "messages": HI, "max_tokens": 2},
}


def strict(text: str) -> dict[str, Any]:
    """The error of a body that must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    error: dict[str, Any] = json.loads(text, parse_constant=refuse)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def refused(service: Service, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await service.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, (body if len(content) < 300 else "…", reply.status_code, reply.text[:200])
    assert len(reply.content) < 2048
    assert service.llm.num_requests == 0
    return strict(reply.text)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"nan"', "1e400"])
async def test_numbers_that_are_none(service: Service, path: str, field: str, value: str) -> None:
    """B050."""
    body = json.dumps(BODIES[path])[:-1] + f',"{field}":{value}}}'
    error = await refused(service, path, body.encode())
    assert "nan" not in error["message"].lower().replace("finite", "")


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 1.5, 10**8, 1 << 63]),
        ("temperature", [-1, 3, "hot", True]),
        ("top_p", [0, 7]),
        ("top_k", [-5]),
        ("logit_bias", [{"99999999": 5}, {"-1": 5}, {"abc": 5}, {"5": None}, {"5": 1000}, {"300": 1}]),
        ("stop_token_ids", [[310], [-3], [1 << 31], [1 << 63], ["a"]]),
        ("allowed_token_ids", [[], [300]]),
        ("bad_words", [[" "], [""], [5], "abc", [None]]),
        ("stop", [["a"] * 100, [""], 5]),
        ("seed", [1 << 70, 1.5]),
        ("max_tokens", [-1, "many"]),
        ("min_tokens", [-1, 9]),
        ("prompt_logprobs", [-2, 10**9]),
        ("cache_salt", ["", 5, ["a"], "s" * 100_000]),
        ("priority", [1, 1 << 70]),
        ("request_id", ["", "x" * 100_000, 5, "ü", "a\n", "a\r\nX-Evil: 1"]),
        ("stream_options", [{"include_usage": True}, 5]),
    ],
)
async def test_values_out_of_range(service: Service, path: str, field: str, values: list[Any]) -> None:
    """B031, B046, B047, B053, B094, B098."""
    for value in values:
        error = await refused(service, path, {**BODIES[path], field: value})
        assert (error["param"] or "").startswith(field), (field, value, error)


async def test_huge_but_legal_values(service: Service) -> None:
    """B094: what the context bounds anyway is not refused."""
    for body in ({"max_tokens": 10**12}, {"max_tokens": 10**30}, {"top_k": 1 << 40}):
        service.say("ok")
        reply = await service.complete(**body)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("prompt", ["", [""], ["ok", ""], [], [[]], [[1], []], ["a", 1], [1, [2]], [300], [-1]])
async def test_prompts(service: Service, prompt: Any) -> None:
    """B049, B083: one error, no half result."""
    await refused(service, COMPLETION, {"model": MODEL, "prompt": prompt})
    assert service.core.added == []


async def test_length_limits(service: Service) -> None:
    """B058, B083."""
    for prompt in ("x" * MAX_LEN, "x" * 100_000, ["ok", "x" * MAX_LEN]):
        error = await refused(service, COMPLETION, {"model": MODEL, "prompt": prompt})
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_LEN) in error["message"]
    service.say("y" * 200, end=False)
    answer = (await service.complete(prompt="x" * (MAX_LEN - 3), max_tokens=10_000)).json()
    assert answer["usage"]["total_tokens"] == MAX_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "x",
        ["x"],
        [7] * 3000,
        [{"content": "x"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}],
        [{"role": "user", "content": [{"type": "nope", "text": "SECRETMARK"}] * 900}],
        [{"role": 5, "content": {"a": "SECRETMARK"}}] * 3000,
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a:"}}]}],
    ],
)
async def test_messages(service: Service, messages: Any) -> None:
    """B049, B062, B097, B100."""
    error = await refused(service, CHAT, {"model": MODEL, "messages": messages})
    assert "SECRETMARK" not in error["message"]
    await refused(service, "/tokenize", {"model": MODEL, "messages": messages})


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}],
        [{"role": "developer", "content": "a"}, *HI],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
        [*HI, {"role": "assistant", "content": "x", "tool_calls": []}, *HI],
        [*HI, {"role": "assistant", "content": None, "tool_calls": []}, *HI],
        [*HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": []}, *HI],
    ],
)
async def test_messages_that_are_legal(service: Service, messages: Any) -> None:
    """B062."""
    assert (await service.chat(messages=messages, max_tokens=2)).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b"[" * 100_000, b'{"prompt":"\\ud800"}']
)
async def test_bodies_that_are_no_request(service: Service, body: bytes) -> None:
    for path in (COMPLETION, CHAT, "/tokenize", "/detokenize"):
        await refused(service, path, body)


async def test_content_type(service: Service) -> None:
    reply = await service.http.post(COMPLETION, content=b"{}", headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415
    strict(reply.text)


@pytest.mark.parametrize("model", ["none", "", "../../etc", "a\x00b", "x" * 10_240])
async def test_unknown_models(service: Service, model: str) -> None:
    """B101, B112."""
    for path in (COMPLETION, CHAT, "/tokenize"):
        error = await refused(service, path, {**BODIES.get(path, {"prompt": "x"}), "model": model}, status=404)
        assert error["code"] == "model_not_found"
        assert "etc" not in error["message"]


async def test_unknown_paths_and_methods(service: Service) -> None:
    for method, path, status in (("POST", "/v1/nope", 404), ("GET", COMPLETION, 405), ("POST", "/v1/models", 405)):
        reply = await service.http.request(method, path)
        assert reply.status_code == status
        strict(reply.text)


async def test_body_limit(start_service: StartService) -> None:
    service = await start_service(max_body=2000)
    body = json.dumps({"model": MODEL, "prompt": "x" * 3000}).encode()

    async def in_parts() -> Any:
        for start in range(0, len(body), 500):
            yield body[start : start + 500]

    for content in (body, in_parts()):
        headers = {"Content-Type": "application/json"}
        reply = await service.http.post(COMPLETION, content=content, headers=headers)
        assert reply.status_code == 413
        assert strict(reply.text)["code"] == "body_too_large"
    assert (await service.complete()).status_code == 200


# Values that a client may send because its library always does.
HARMLESS: dict[str, list[Any]] = {
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "store": [False],
    "service_tier": ["auto", "default"],
    "response_format": [{"type": "text"}],
    "use_beam_search": [False],
    "length_penalty": [1.0],
}
HARMLESS_CHAT: dict[str, list[Any]] = {
    "parallel_tool_calls": [True, False],
    "modalities": [["text"]],
    "tool_choice": ["none"],
    "reasoning_effort": ["none"],
    "verbosity": ["medium"],
}
REFUSED: dict[str, list[Any]] = {
    "store": [True],
    "service_tier": ["flex"],
    "use_beam_search": [True],
    "truncate_prompt_tokens": [5],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "user": [5],
}
REFUSED_CHAT: dict[str, list[Any]] = {
    "tools": [[]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "x"}}],
    "functions": [[]],
    "function_call": [{"name": "x"}],
    "audio": [{"voice": "x"}],
    "modalities": [["text", "audio"]],
    "web_search_options": [{}],
    "chat_template": ["{% for i in range(10) %}{% endfor %}"],
    "reasoning_effort": ["high"],
    "echo": [True],
}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_fields_of_openai_clients(service: Service, path: str) -> None:
    chat = path == CHAT
    for field, values in (HARMLESS | HARMLESS_CHAT if chat else HARMLESS | {"suffix": [""], "best_of": [1]}).items():
        for value in [*values, None]:
            reply = await service.http.post(path, json={**BODIES[path], field: value})
            assert reply.status_code == 200, (field, value, reply.text)
    for field, values in (
        REFUSED | REFUSED_CHAT if chat else REFUSED | {"suffix": ["x"], "best_of": [3, 10**6]}
    ).items():
        for value in values:
            error = await refused(service, path, {**BODIES[path], field: value})
            assert error["param"] == field, (field, value, error)
            assert "SECRETMARK" not in error["message"]


def test_every_row_of_the_table_is_tested() -> None:
    tested = {*HARMLESS, *HARMLESS_CHAT, *REFUSED, *REFUSED_CHAT, "suffix", "prediction", "documents"}
    assert set(REFUSALS) <= tested


EFFORT_TEMPLATES = {
    "plain": "{{ messages[0].content }}",
    "switch": "{{ messages[0].content }}{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}</think>",
    "marks": "{{ messages[0].content }}</think>",
    "levels": "{{ messages[0].content }}[{{ reasoning_effort }}]",
}


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("plain", "none", "Hi"),
        ("plain", "medium", None),
        ("plain", "no such", None),
        ("plain", 5, None),
        ("switch", "none", "Hi[False]</think>"),
        ("switch", "medium", "Hi</think>"),
        ("switch", "high", None),
        ("marks", "none", None),
        ("marks", "medium", "Hi</think>"),
        ("levels", "none", "Hi[none]"),
        ("levels", "high", "Hi[high]"),
        ("levels", "huge", None),
    ],
)
async def test_reasoning_effort_is_done_or_refused(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, template: str, effort: Any, prompt: str | None
) -> None:
    monkeypatch.setattr("tests.http_service.TEMPLATE", EFFORT_TEMPLATES[template])
    service = await start_service()
    if prompt is None:
        error = await refused(service, CHAT, {**BODIES[CHAT], "reasoning_effort": effort})
        assert error["param"] == "reasoning_effort"
        return
    assert (await service.chat(reasoning_effort=effort)).status_code == 200
    assert service.tokenizer.decode(service.core.added[0].prompt_token_ids) == prompt
    own = {"reasoning_effort": "x", "enable_thinking": True}
    assert (await service.chat(reasoning_effort=effort, chat_template_kwargs=own)).status_code == 200
    told = service.tokenizer.decode(service.core.added[1].prompt_token_ids)
    assert told == {"switch": "Hi[True]</think>", "levels": "Hi[x]"}.get(template, prompt), "the request's own wins"


PADDED = {"include_usage": True, "include_obfuscation": True}


async def test_unknown_fields_are_named(service: Service) -> None:
    for path in (COMPLETION, CHAT):
        error = await refused(service, path, {**BODIES[path], "guided_json": {}})
        assert error["param"] == "guided_json" and "structured_outputs" in error["message"]
        error = await refused(service, path, {**BODIES[path], "stream": True, "stream_options": {"x": 1}})
        assert error["param"] == "stream_options.x"
        error = await refused(service, path, {**BODIES[path], "stream": True, "stream_options": PADDED})
        assert error["param"] == "stream_options.include_obfuscation"


async def test_contradictions(service: Service) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    limits = {"max_tokens": 2, "max_completion_tokens": 3}
    for body in (both, limits, {"top_logprobs": 3, "logprobs": False}, {"top_logprobs": 3}, {"max_tokens": 0}):
        await refused(service, CHAT, {**BODIES[CHAT], **body})
    assert (await service.chat(top_logprobs=0, logprobs=False)).status_code == 200, "nobody asks for any"
    assert (await service.chat(max_tokens=2, max_completion_tokens=2)).status_code == 200
    for path in (COMPLETION, CHAT):
        await refused(service, path, {**BODIES[path], "stream": True, "prompt_logprobs": 1})
    await refused(service, "/tokenize", {"prompt": "a", "messages": HI})
    await refused(service, "/tokenize", {})


async def test_detokenize_refuses_what_is_no_token(service: Service) -> None:
    """B080."""
    for tokens in ([300], [-1], ["a"], [1 << 40], "x"):
        await refused(service, "/detokenize", {"tokens": tokens})
    assert (await service.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_priority_with_the_policy(start_service: StartService) -> None:
    service = await start_service(settings={"scheduling_policy": "priority"})
    assert (await service.complete(priority=-7)).status_code == 200
    assert service.core.added[0].priority == -7


async def test_queue_limit(start_service: StartService) -> None:
    service = await start_service(auto=False, settings={"max_num_queued_reqs": 1, "max_num_seqs": 1})
    first = asyncio.create_task(service.complete(prompt=["a", "b"], max_tokens=1))
    while service.llm.num_requests < 2:
        await asyncio.sleep(0)
    reply = await service.complete()
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert strict(reply.text)["code"] == "queue_full"
    lines = (await service.http.get("/metrics")).text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:admission_rejections_total{")]
    assert [line.endswith(" 1.0") for line in counts if 'reason="max_num_queued_reqs"' in line] == [True]
    service.core.step(2)
    assert (await first).status_code == 200


@pytest.mark.parametrize("asked", [{"n": 5}, {"prompt": ["a"] * 5}, {"prompt": ["a", "b", "c"], "n": 2}])
async def test_what_no_queue_could_take_is_refused_for_good(start_service: StartService, asked: dict[str, Any]) -> None:
    service = await start_service(settings={"max_num_queued_reqs": 2, "max_num_seqs": 2})
    assert (await service.complete(n=4, max_tokens=1)).status_code == 200
    error = await refused(service, COMPLETION, {**BODIES[COMPLETION], **asked})
    assert error["param"] == "n"
    assert " 4," in error["message"]


METADATA_BOUND = {f"{i:02}" + "é" * 62: "x" * 512 for i in range(16)}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_metadata_has_openais_bounds(service: Service, path: str) -> None:
    assert (await service.http.post(path, json={**BODIES[path], "metadata": METADATA_BOUND})).status_code == 200
    for metadata in (
        {**METADATA_BOUND, "one": "more"},
        {"k" * 65: "x"},
        {"k": "x" * 513},
        {"k": 1},
        {"k": None},
        ["k"],
    ):
        error = await refused(service, path, {**BODIES[path], "metadata": metadata})
        assert (error["param"] or "").split("[")[0] == "metadata"


def test_the_page_has_the_bounds_of_metadata() -> None:
    (shape, null) = openapi_document()["components"]["schemas"]["ChatRequest"]["properties"]["metadata"]["anyOf"]
    assert null == {"type": "null"}
    assert (shape["maxProperties"], shape["propertyNames"]["maxLength"]) == (16, 64)
    assert shape["additionalProperties"] == {"type": "string", "maxLength": 512}
