"""TLS flags on a real socket: the operator's certificate, and client certificates where they are asked for."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.http.conftest import StartService

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """Paths of a certificate that signs itself, and of its key."""
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    words = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}".split()
    address = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", *words, *address, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=30
    )
    return certificate, key


async def get(url: str, trusted: str, own: tuple[str, str] | None = None) -> int:
    context = ssl.create_default_context(cafile=trusted)
    if own is not None:
        context.load_cert_chain(*own)
    async with httpx.AsyncClient(base_url=url.replace("http:", "https:"), verify=context, trust_env=False) as client:
        return (await client.get("/v1/models", timeout=5)).status_code


async def test_tls_with_and_without_client_certificates(start_service: StartService, tmp_path: Path) -> None:
    server, client, stranger = (make_certificate(tmp_path, name) for name in ("server", "client", "stranger"))
    files = {"ssl_certfile": server[0], "ssl_keyfile": server[1]}
    service = await start_service(**files)
    assert await get(service.url, server[0]) == 200
    with pytest.raises(httpx.HTTPError):
        await service.http.get("/v1/models")
    with pytest.raises(httpx.ConnectError):
        await get(service.url, stranger[0])
    closed = await start_service(**files, ssl_ca_certs=client[0])
    assert await get(closed.url, server[0], client) == 200
    for own in (None, stranger):
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            await get(closed.url, server[0], own)
