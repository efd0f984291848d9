"""What every request passes: keys, health, draining, limits of origin, and the pages about the server itself."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.entrypoints.openai.app import ROUTES, openapi_document
from headrace.entrypoints.openai.auth import OPEN_PATHS, KeyGuard
from headrace.entrypoints.openai.protocol import REQUEST_BODIES
from headrace.messages.outputs import EngineCoreOutputs, SchedulerStats
from tests.http.conftest import StartService
from tests.http_service import MODEL, Service


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (b"Bearer one", True),
        (b"bearer two", True),
        (b"Bearer  one ", True),
        (b"Bearer three", False),
        (b"Bearer ", False),
        (b"Basic one", False),
        (b"one", False),
        (b"Bearer \xff\xfe", False),
        (b"", False),
        (None, False),
    ],
)
def test_keys(header: bytes | None, allowed: bool) -> None:
    guard = KeyGuard(["one", "two"])
    assert guard.allows("/v1/models", header) is allowed
    assert all(guard.allows(path, header) for path in OPEN_PATHS)
    assert KeyGuard([]).allows("/v1/models", header)
    assert KeyGuard([""]).allows("/v1/models", header)


async def test_the_key_guards_every_route_but_a_few(start_service: StartService) -> None:
    service = await start_service(api_key=("secret",))
    paths = {(method, path.replace("{model:path}", MODEL)) for method, path, _ in ROUTES}
    for method, path in [*paths, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nope"), ("POST", "/v1//models")]:
        reply = await service.http.request(method, path)
        if path in OPEN_PATHS:
            assert reply.status_code == 200, path
        else:
            assert reply.status_code == 401, path
            assert "secret" not in reply.text
    headers = {"Authorization": "Bearer secret"}
    assert (await service.http.get("/v1/models", headers=headers)).status_code == 200
    reply = await service.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert reply.status_code == 200


async def test_health_is_progress(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """B085: red while work stands still, green when it goes on."""
    from headrace.frontend import async_llm, health

    monkeypatch.setattr(health, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(async_llm, "_WATCH_INTERVAL_S", 0.01)
    service = await start_service(auto=False)
    service.say("abc")

    async def becomes(status: int) -> None:
        async with asyncio.timeout(3):
            while (await service.http.get("/health")).status_code != status:
                await asyncio.sleep(0.01)

    await becomes(200)
    pending = asyncio.create_task(service.complete())
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    await becomes(503)
    assert (await service.http.get("/ready")).status_code == 503
    service.core.step()
    await becomes(200)
    service.core.step(3)
    assert (await pending).status_code == 200
    await becomes(200)


async def test_death_is_seen_at_once(start_service: StartService) -> None:
    service = await start_service(auto=False)
    service.core.die("out of memory while reading /models/secret.gguf")
    reply = await service.http.get("/health")
    assert reply.status_code == 503
    assert "the engine has stopped: out of memory while reading a file" in reply.json()["error"]["message"]
    reply = await service.complete()
    assert reply.status_code == 503
    assert "out of memory while reading a file" in reply.text and "secret" not in reply.text
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]


async def test_draining(start_service: StartService) -> None:
    """B088: what runs finishes, new work is refused, readiness goes off, health stays."""
    service = await start_service(auto=False)
    service.say("abc")
    running = asyncio.create_task(service.complete(stream=True))
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    service.context.draining = True
    reply = await service.complete()
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert (await service.http.get("/ready")).status_code == 503
    assert (await service.http.get("/health")).status_code == 200
    assert (await service.http.get("/v1/models")).status_code == 200
    service.core.step(4)
    assert (await running).text.endswith("data: [DONE]\n\n")


async def test_load_counts_what_is_in_flight(start_service: StartService) -> None:
    service = await start_service(auto=False)
    assert (await service.http.get("/load")).json() == {"server_load": 0}
    pending = asyncio.create_task(service.complete())
    while not service.core.num_running:
        await asyncio.sleep(0.001)
    assert (await service.http.get("/load")).json() == {"server_load": 1}
    service.core.step(6)
    await pending
    assert (await service.http.get("/load")).json() == {"server_load": 0}


async def test_metrics_equal_the_clients_sums(service: Service) -> None:
    """B089, B091."""
    prompt = generated = 0
    for body in ({}, {"n": 2, "temperature": 1}, {"prompt": ["a", "bcd"]}, {"stop": ["l"]}, {"max_tokens": 2}):
        usage = (await service.complete(**{"max_tokens": 9, **body})).json()["usage"]
        prompt += usage["prompt_tokens"]
        generated += usage["completion_tokens"]
    service.core.send(EngineCoreOutputs(stats=SchedulerStats()))
    await asyncio.sleep(0.01)
    text = (await service.http.get("/metrics")).text
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:prompt_tokens_total{labels} {prompt}.0" in text
    assert f"vllm:generation_tokens_total{labels} {generated}.0" in text
    assert f"vllm:num_requests_running{labels} 0.0" in text


@pytest.mark.parametrize("name", ["x" * 200, "a b", "ü"])
async def test_bad_request_ids_in_the_header(service: Service, name: str) -> None:
    headers = {"X-Request-Id": name.encode()}
    reply = await service.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)  # type: ignore[arg-type]
    assert reply.status_code == 400
    assert name not in reply.headers["x-request-id"]


async def test_origins_are_closed_by_default(start_service: StartService) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    closed = await start_service()
    reply = await closed.http.options("/v1/completions", headers=ask)
    assert "access-control-allow-origin" not in reply.headers
    opened = await start_service(allowed_origin=("https://a.example",), api_key=("secret",))
    reply = await opened.http.options("/v1/completions", headers=ask)
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    other = await opened.http.options("/v1/completions", headers={**ask, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_pages_about_the_server(service: Service) -> None:
    page = await service.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=|https?:|<script|@import", page.text), "nothing comes from elsewhere"
    for path, kind in REQUEST_BODIES.items():
        assert path in page.text
        assert all(f"<code>{name}</code>" in page.text for name in kind.__struct_fields__), path
    document = (await service.http.get("/openapi.json")).json()
    assert document == openapi_document()
    for path, kind in REQUEST_BODIES.items():
        schema = document["components"]["schemas"][kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert document["paths"][path]["post"]["requestBody"]
    assert (await service.http.get("/version")).json()["version"]


def test_the_server_process_never_imports_torch() -> None:
    code = """
import sys
import headrace.entrypoints.openai.server, headrace.entrypoints.openai.app, headrace.entrypoints.async_engine
import headrace.entrypoints.engine_config, headrace.core.make_client, headrace.core.process_client
import headrace.observability.metrics, headrace.observability.stats_log
for name in ("main", "serve", "chat", "generate", "pull", "explain_config", "doctor", "local_engine", "remote"):
    __import__("headrace.entrypoints.cli." + name)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_options_are_flags() -> None:
    import argparse

    from headrace.entrypoints.openai.options import ServerOptions, add_server_flags, options_from_args

    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    assert options_from_args(parser.parse_args([])) == ServerOptions()
    words: list[Any] = ["--port", "9", "--api-key", "a", "--api-key", "b", "--max-body", "1MiB", "--access-log"]
    options = options_from_args(parser.parse_args(words))
    assert (options.port, options.api_key, options.max_body, options.access_log) == (9, ("a", "b"), 1 << 20, True)
    for key in ("", " "):
        with pytest.raises(ConfigError, match="--api-key must not be empty"):
            options_from_args(parser.parse_args(["--api-key", "a", "--api-key", key]))


def test_useless_settings_are_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    from headrace.entrypoints.openai.options import ServerOptions
    from headrace.entrypoints.openai.server import bind, check_tls

    check_tls(ServerOptions())
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for options in (
        ServerOptions(ssl_keyfile="key.pem"),
        ServerOptions(ssl_certfile=str(tmp_path / "none.pem")),
        ServerOptions(ssl_certfile=str(broken)),
    ):
        with pytest.raises(ConfigError, match="ssl-certfile"):
            check_tls(options)
    with bind(ServerOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="choose another"):
            bind(ServerOptions(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match=r"cannot listen on .*:99999"):
        bind(ServerOptions(port=99999))
