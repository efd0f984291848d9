"""The error families of headrace.

Owns the distinction that every border needs: who is at fault, and what may be shown to a client. It knows
nothing of HTTP; ``entrypoints`` maps a family to a status code.

- `InvalidRequestError`: the caller's fault (a 4xx). It is a ``ValueError``, so users of ``LLM`` can catch it as one.
- `ConfigError`, `ModelFileError`: the operator's fault, found at start-up. The message names the remedy.
- `EngineDeadError`: the engine is gone; every stream ends with it. The message carries the root cause.
- `RequestFailedError`: one request failed inside the engine (a 5xx for that request alone).
"""


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose."""


class InvalidRequestError(HeadraceError, ValueError):
    """A request asks for something that cannot be done.

    Args:
        message: one sentence for the client: what is wrong and what would be right. Never echoes the raw value.
        param: the name of the offending field, as the client spelt it.
        code: a short machine-readable word, for example ``context_length_exceeded`` or ``model_not_found``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class QueueFullError(HeadraceError):
    """The engine takes no more work now; retry after ``retry_after_s`` seconds (a 429).

    ``limit`` names the setting that was reached.
    """

    def __init__(self, message: str, *, retry_after_s: float, limit: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.limit = limit


class NotAcceptingError(HeadraceError):
    """The engine is draining, asleep or stopped and admits nothing (a 503)."""


class ConfigError(HeadraceError, ValueError):
    """A setting that cannot work, with the reason and the remedy."""


class ModelFileError(HeadraceError, ValueError):
    """A model file that is missing, broken or not supported; the message names the file and the tensor or key."""


class RequestFailedError(HeadraceError, RuntimeError):
    """One request failed inside the engine; all others go on."""


class ControlFailedError(RequestFailedError):
    """A control verb was refused or failed; the message is for the operator who sent it."""


class EngineDeadError(HeadraceError, RuntimeError):
    """The engine core is gone. ``str(error)`` is the root cause and what to do."""
