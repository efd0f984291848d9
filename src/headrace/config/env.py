"""The only reader of environment variables.

| variable | meaning |
|---|---|
| ``HEADRACE_HOME`` | folder of the caches (``~/.cache/headrace``) |
| ``HEADRACE_API_KEY`` | API key of the server, beside ``--api-key`` |
| ``HEADRACE_ISA`` | force an instruction set of the CPU kernels |
| ``HEADRACE_LOG_LEVEL`` | log level before the configuration is read |
| ``HF_HUB_OFFLINE`` | never ask the hub |
| ``HF_TOKEN`` | read by ``huggingface-hub`` itself |
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Folder of downloaded models and parsed tokenizers."""
    base = os.environ.get("HEADRACE_HOME")
    return Path(base).expanduser() if base else Path.home() / ".cache" / "headrace"


def api_key() -> str | None:
    """The server's key, if set."""
    return os.environ.get("HEADRACE_API_KEY") or None


def forced_isa() -> str | None:
    """Instruction set to use instead of the best one."""
    return os.environ.get("HEADRACE_ISA") or None


def log_level() -> str:
    """Log level before the configuration is read."""
    return os.environ.get("HEADRACE_LOG_LEVEL") or "info"


def offline() -> bool:
    """Whether the hub must not be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
