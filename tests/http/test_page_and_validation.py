"""The OpenAPI page and the validation say the same: every type and every range of the page is tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.entrypoints.openai.app import ROUTES, openapi_document
from headrace.entrypoints.openai.protocol import REQUEST_BODIES
from tests.http.conftest import StartService
from tests.http_service import MODEL, Service

TURN = {"role": "user", "content": "Hi"}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 2},
    "/v1/completions/render": {"prompt": "ab"},
    "/v1/chat/completions/render": {"messages": [TURN]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1]},
    "/inference/v1/abort_requests": {"request_ids": ["x"]},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1]},
}
ONE_OF_EACH: dict[str, Any] = {
    "string": "x", "integer": 3, "number": 1.5, "boolean": True, "array": [None], "object": {"x": None},
}  # fmt: skip
NEEDS = {"top_logprobs": {"logprobs": True}, "min_tokens": {"max_tokens": 9}}
"""What another field must say, so that a value is looked at by itself."""


def properties(path: str) -> dict[str, Any]:
    document = openapi_document()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    found: dict[str, Any] = document["components"]["schemas"][body.rsplit("/", 1)[1]]["properties"]
    return found


def kinds(schema: dict[str, Any]) -> set[str]:
    """JSON types that a field takes; empty where it takes any."""
    if "anyOf" in schema:
        return {kind for one in schema["anyOf"] for kind in kinds(one)}
    if "$ref" in schema:
        return {"object"}
    kind = schema.get("type", "string" if "enum" in schema else None)
    return {kind} | ({"integer"} if kind == "number" else set()) if kind else set()


def numbers(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for one in schema.get("anyOf", [schema]):
        if one.get("type") in ("number", "integer") and {"minimum", "exclusiveMinimum", "maximum"} & one.keys():
            yield one


async def post(service: Service, path: str, body: dict[str, Any]) -> tuple[int, str]:
    named = {} if path.endswith("abort_requests") else {"model": MODEL}
    reply = await service.http.post(path, content=json.dumps({**named, **body}))
    error = reply.json().get("error") if isinstance(reply.json(), dict) else None
    return reply.status_code, (error or {}).get("param") or ""


def test_every_body_is_on_the_page_and_tried() -> None:
    posted = {path for method, path, _ in ROUTES if method == "POST"}
    assert set(BASES) == set(REQUEST_BODIES) == posted - {"/start_profile", "/stop_profile", "/sleep", "/wake_up"}


@pytest.mark.parametrize("path", {kind: path for path, kind in reversed(REQUEST_BODIES.items())}.values())
async def test_types(service: Service, path: str) -> None:
    for name, schema in properties(path).items():
        taken = kinds(schema)
        for kind, value in ONE_OF_EACH.items():
            if taken and kind not in taken:
                status, param = await post(service, path, {**BASES[path], name: value})
                assert (status, param.partition("[")[0].partition(".")[0]) == (400, name), (name, value)
        if "default" in schema and schema["default"] is None:
            status, param = await post(service, path, {**BASES[path], name: None})
            assert status == 200 or name in BASES[path], (name, param)
    assert await post(service, path, {**BASES[path], "no_such": 1}) == (400, "no_such")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_ranges(start_service: StartService, path: str) -> None:
    service = await start_service()
    tried = set()
    for name, schema in properties(path).items():
        for number in numbers(schema):
            least, above, most = (number.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
            step = 1 if number["type"] == "integer" else 1e-6
            good = [v for v in (least, most, None if above is None else above + step) if v is not None]
            bad = [v for v in (above, None if least is None else least - step) if v is not None]
            bad += [] if most is None else [most + step]
            more = {
                **BASES[path],
                **{key: value for key, value in NEEDS.get(name, {}).items() if key in properties(path)},
            }
            # -1 logprobs need the operator's leave.
            for value in [0] if "logprobs" in name else good:
                if path == "/v1/responses" and name == "top_logprobs":
                    more["include"] = ["message.output_text.logprobs"]
                elif name == "max_completion_tokens":
                    more.pop("max_tokens", None)
                assert await post(service, path, {**more, name: value}) == (200, ""), (name, value)
            for value in bad:
                status, param = await post(service, path, {**more, name: value})
                assert status == 400 and param in (name, "logprobs"), (name, value, param)
            tried.add(name)
    assert {"temperature", "top_p", "top_k", "seed", "min_tokens"} <= tried
