"""One place that sets up logging, for people by default and as JSON lines on request.

Loggers are plain ``logging`` loggers under ``headrace``; no prompt, key or file content is ever logged.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal

LogFormat = Literal["text", "json"]


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; ``name`` is its ``__name__``."""
    return logging.getLogger(name)


def setup_logging(level: str = "info", style: LogFormat = "text", role: str = "") -> None:
    """Send ``headrace``'s log to standard error.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        style: ``text`` for people, ``json`` for one JSON object a line.
        role: the process's role (``core``, ``worker``), put in front of each text line when not empty.
    """
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        prefix = f"[{role}] " if role else ""
        handler.setFormatter(logging.Formatter(f"%(levelname).1s %(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    logger = logging.getLogger("headrace")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
