"""What is said of a death: the root cause, and what to do about it, in one sentence.

It stands in the log of whoever dies and in the last line of the server. What comes from elsewhere (another library's
words, which may hold anything) stands behind the remedy, after the type of its exception.
"""

from __future__ import annotations

import signal

from headrace.base.errors import HeadraceError

MORE_MEMORY = "lower --kv-cache-memory or --max-num-seqs, or give it more memory, and restart the server"
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


def describe_cause(error: BaseException) -> str:
    """The innermost explicit cause of ``error``; errors of headrace's own name their remedy themselves."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error) or "no message"
    if isinstance(error, HeadraceError):
        return text
    told = f"{type(error).__name__}: {text}"
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in _NO_MEMORY):
        return f"out of memory; {MORE_MEMORY}: {told}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"a file cannot be used; put it right and restart the server: {told}"
    return f"a fault inside headrace; restart the server, and report it with the log: {told}"


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code (negative for a signal), as the end of a sentence that names it."""
    if code == -signal.SIGKILL:
        return f"was ended by SIGKILL, which the kernel sends when memory is short (or somebody did); {MORE_MEMORY}"
    if code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
        return f"was ended by {signal.Signals(-code).name} from outside; restart the server"
    if code < 0:
        name = signal.Signals(-code).name
        return f"crashed with {name}; the log has its last words; restart the server, and report it if it recurs"
    return f"exited with code {code}; the log has its last words; restart the server"
