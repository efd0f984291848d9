"""From exceptions to OpenAI's error body.

Owns the mapping of the error families to status codes. Every body is strict JSON, short, and never holds what the
client sent: messages are written by headrace, and the only echo is the name of a field. The root cause of the engine's
death is told to everybody whom it hits, without paths and without the words of errors that are not headrace's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.base.errors import (
    ControlFailedError,
    EngineDeadError,
    InvalidRequestError,
    NotAcceptingError,
    QueueFullError,
    RequestFailedError,
)
from headrace.base.logging import get_logger

logger = get_logger(__name__)

MAX_MESSAGE_CHARS = 500
MAX_FIELD_CHARS = 64

_FOREIGN_WORDS = re.compile(r"\b([A-Z]\w*): .*", re.DOTALL)
"""An exception's type, and after it words that may hold anything."""
_FILE_PATH = re.compile(r"""(?:[A-Za-z]:)?[/\\][^\s'"`,;:()]+""")
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than success that a route decides on itself."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What a client is told."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        param = self.param[:MAX_FIELD_CHARS] if self.param else None
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message[:MAX_MESSAGE_CHARS]
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": self.code}})

    def response(self) -> Response:
        """The HTTP answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")


def public_cause(cause: str) -> str:
    """The root cause of a death as everybody may read it; the log has all of it."""
    return _FILE_PATH.sub("a file", _FOREIGN_WORDS.sub(r"\1", cause))


def describe(error: BaseException, request_id: str = "") -> ErrorInfo:
    """What a client is told about ``error``; what is not the client's fault and has no family is logged here.

    Faults inside are told in general words with the ``request_id`` under which the log names the cause: a cause may
    hold paths, addresses or pieces of other requests.
    """
    named = f" (request {request_id})" if request_id else ""
    match error:
        case ApiError():
            return ErrorInfo(error.status, error.message, error.param, error.code)
        case InvalidRequestError():
            status = {"model_not_found": 404, "body_too_large": 413}.get(error.code or "", 400)
            return ErrorInfo(status, error.message, error.param, error.code)
        case QueueFullError():
            return ErrorInfo(429, error.message, None, "queue_full", error.retry_after_s)
        case NotAcceptingError():
            return ErrorInfo(503, str(error) or "the server accepts no requests now", None, "not_accepting", 1.0)
        case EngineDeadError():
            message = f"the engine has stopped: {public_cause(str(error))}; the server's log has the details{named}"
            return ErrorInfo(503, message, None, "engine_dead")
        case ControlFailedError():
            return ErrorInfo(409, str(error), None, "control_failed")
        case RequestFailedError():
            message = f"the request failed inside the engine; the server's log has the cause{named}"
            return ErrorInfo(500, message, None, "request_failed")
        case HTTPException():
            return ErrorInfo(error.status_code, str(error.detail))
        case RecursionError():
            # Nothing is as deep but what a client nests: a body may be just shallow enough to be read.
            return ErrorInfo(400, "the body is nested too deep", None, "nested_too_deep")
        case _:
            logger.error("unexpected error while answering request %s", request_id, exc_info=error)
            return ErrorInfo(500, f"internal error; the server's log has the cause{named}", None, "internal_error")
