"""The hub's library against a small hub of our own: repositories, single files, and starts without network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
COMMIT = "c" * 40
REPOSITORIES = {
    "org/folder": {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"not wanted",
        "onnx/model.onnx": b"not wanted",
    },
    "org/one": {"README.md": b"hi", "only.gguf": b"GGUF one"},
}


class FakeHub(BaseHTTPRequestHandler):
    """The routes that downloading uses."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        body, kind = self.find(path)
        if body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def find(self, path: str) -> tuple[bytes | None, str]:
        if path == "/":
            return b"hub", "text/plain"
        for repo, files in REPOSITORIES.items():
            if path.startswith(f"/api/models/{repo}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in files.items()
                ]
                return json.dumps(tree).encode(), "application/json"
            if path in (
                f"/api/models/{repo}",
                f"/api/models/{repo}/revision/main",
                f"/api/models/{repo}/revision/{COMMIT}",
            ):
                about = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                return json.dumps(about).encode(), "application/json"
            for name, body in files.items():
                if path in (f"/{repo}/resolve/main/{name}", f"/{repo}/resolve/{COMMIT}/{name}"):
                    return body, "application/octet-stream"
        return None, ""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    FakeHub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def fetch(name: str, endpoint: str, cache: Path, **env: str) -> tuple[int, str]:
    """Fetch in a process of its own: the library reads its settings when it is imported."""
    code = "import sys; from headrace.model_files.download import fetch_model as f; print(f(sys.argv[1], None, False))"
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HEADRACE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **settings, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_a_folder_without_what_is_not_needed_and_again_without_network(hub: str, tmp_path: Path) -> None:
    status, path = fetch("org/folder", hub, tmp_path)
    assert status == 0, path
    assert sorted(file.name for file in Path(path).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(path) / "model.safetensors").read_bytes() == b"weights"
    asked = len(FakeHub.asked)
    assert fetch("org/folder", hub, tmp_path, HF_HUB_OFFLINE="1") == (0, path)
    assert len(FakeHub.asked) == asked
    assert fetch("org/folder", "http://127.0.0.1:9", tmp_path) == (0, path)


def test_a_repository_with_one_gguf_file(hub: str, tmp_path: Path) -> None:
    for name in ("org/one", "org/one/only.gguf"):
        status, path = fetch(name, hub, tmp_path)
        assert status == 0, path
        assert Path(path).name == "only.gguf" and Path(path).read_bytes() == b"GGUF one"
    assert fetch("org/one", hub, tmp_path, HF_HUB_OFFLINE="1") == (0, path)


def test_an_unknown_repository_is_named(hub: str, tmp_path: Path) -> None:
    status, text = fetch("org/none", hub, tmp_path)
    assert status != 0
    assert "ModelFileError: org/none: the hub refused" in text
