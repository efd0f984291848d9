"""The Hugging Face hub as a source of models.

`huggingface_hub` is imported only when the hub is really asked, and the hub is asked only after a probe of a few
seconds has found it: without network a start must not hang in retries. Repositories go to the hub's own cache, which
other programs share.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from headrace.base.errors import ModelFileError
from headrace.base.logging import get_logger
from headrace.config import env
from headrace.model_files.names import KnownModel

logger = get_logger(__name__)
_PROBE_TIMEOUT_S = 4.0
_CONNECT_TIMEOUT_S = 3.0
_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?")

T = TypeVar("T")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``org/name`` or ``org/name/file.gguf``."""
    return _HUB_ID.fullmatch(name) is not None


class KnownFileFetcher:
    """Takes a known file from its repository."""

    name = "hub"

    def __init__(self, known: KnownModel) -> None:
        self._known = known
        self.title = f"the hub ({known.hub_repo})"

    def fetch(self, staging: Path, show_progress: bool) -> Path:
        """Download the one file."""
        check_reachable()
        return Path(_download_file(self._known.hub_repo, self._known.file, None, show_progress, staging))


def check_reachable() -> None:
    """Raise `ModelFileError` unless the hub answers within a few seconds."""
    if env.offline():
        raise ModelFileError("HF_HUB_OFFLINE is set")
    problem = call_within(_ask_hub, _PROBE_TIMEOUT_S)
    if problem is None:
        raise ModelFileError(f"no answer within {_PROBE_TIMEOUT_S:.0f} s")
    if problem:
        raise ModelFileError(f"cannot be reached ({problem})")


def call_within(function: Callable[[], T], timeout_s: float) -> T | None:
    """Call in a thread and give up on it after ``timeout_s``: name resolution obeys no time-out of its own."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True, name="hub-probe")
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else None


def _ask_hub() -> str:
    """Why the hub cannot be asked, or ``""``. Any HTTP answer counts as reachable."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_CONNECT_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 (whatever the HTTP library raises means that the hub cannot be used)
        return type(error).__name__
    return ""


def fetch_repository(hub_id: str, revision: str | None, show_progress: bool) -> str:
    """Return the local folder (or ``.gguf`` file) of a hub repository, downloading what is missing.

    Raises:
        ModelFileError: no such repository, nothing usable in it, or neither the hub nor a local copy at hand.
    """
    repo, file = _split(hub_id)
    try:
        check_reachable()
    except ModelFileError as error:
        return _find_local(repo, file, revision, str(error))
    if file:
        return _download_file(repo, file, revision, show_progress, None)
    names = _list_files(repo, revision)
    if any(name.endswith(".safetensors") for name in names):
        return _download_folder(repo, revision, show_progress)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return _download_file(repo, ggufs[0], revision, show_progress, None)
    if ggufs:
        raise ModelFileError(f"{repo} holds {len(ggufs)} .gguf files; name one, for example {repo}/{ggufs[0]}")
    raise ModelFileError(f"{repo} holds neither .safetensors nor .gguf files")


def _split(hub_id: str) -> tuple[str, str]:
    """Repository and file (empty for the whole repository)."""
    org, name, *rest = hub_id.split("/")
    return f"{org}/{name}", "/".join(rest)


def _find_local(repo: str, file: str, revision: str | None, problem: str) -> str:
    """The copy that an earlier download left, for starts without network."""
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file:
            return str(hf_hub_download(repo, file, revision=revision, local_files_only=True))
        # Only what was ever asked for can be complete.
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=_PATTERNS))
    except Exception:  # noqa: BLE001 (the library's errors have no common base; any means no local copy)
        raise ModelFileError(
            f"{repo}: the hub {problem} and there is no local copy; connect this machine or give the path of a folder"
        ) from None
    logger.info("the hub %s; using the local copy of %s", problem, repo)
    ggufs = list(folder.glob("*.gguf"))
    return str(ggufs[0] if len(ggufs) == 1 and not (folder / "config.json").exists() else folder)


def _list_files(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        return HfApi().list_repo_files(repo, revision=revision)


def _download_folder(repo: str, revision: str | None, show_progress: bool) -> str:
    from huggingface_hub import snapshot_download

    with _hub_errors(repo, revision), _progress(show_progress):
        return str(snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS))


def _download_file(repo: str, file: str, revision: str | None, show_progress: bool, folder: Path | None) -> str:
    """Into the hub's cache, or into ``folder`` when given."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(repo, revision), _progress(show_progress):
        return str(hf_hub_download(repo, file, revision=revision, local_dir=folder))


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the many errors of the library into one that names the repository."""
    try:
        yield
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFileError(f"{repo}{at}: the hub refused: {reason}") from error


@contextmanager
def _progress(show: bool) -> Iterator[None]:
    """Draw the library's bars only when asked."""
    from huggingface_hub import utils as hub_utils

    if show or hub_utils.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    hub_utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hub_utils.enable_progress_bars()  # type: ignore[attr-defined]
