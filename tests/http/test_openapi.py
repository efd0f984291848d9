"""The OpenAPI page against the server: whatever it allows or forbids, the answers are those that it names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from headrace.entrypoints.openai.app import openapi_document
from tests.simulated_service import SimulatedService, threaded_service

FEW, MANY = 8, 100
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def service() -> Iterator[SimulatedService]:
    with threaded_service() as running:
        yield running


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(FEW, marks=pytest.mark.slow),
        pytest.param(MANY, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
@pytest.mark.parametrize("path", sorted(openapi_document()["paths"]))
@pytest.mark.filterwarnings("default")
def test_the_page_is_kept(service: SimulatedService, path: str, count: int) -> None:
    checks = [getattr(importlib.import_module("schemathesis.checks"), name) for name in CHECKS]
    schema = schemathesis.openapi.from_dict(openapi_document())
    # A followed feed never ends by itself.
    operations = [] if path.endswith("/feed") else list(schema[path].values())
    for operation in operations:

        @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def play(case: object) -> None:
            reply = case.call(base_url=service.url, timeout=10)  # type: ignore[attr-defined]
            assert reply.status_code < 500 or path.startswith(("/start_profile", "/stop_profile")), reply.text
            case.validate_response(reply, checks=checks)  # type: ignore[attr-defined]
            if path == "/sleep":
                httpx.post(f"{service.url}/wake_up", trust_env=False).raise_for_status()

        play()
