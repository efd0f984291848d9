"""Who may call: bearer keys compared in constant time.

Guards every route but the few that load balancers and scrapers read. Keys are kept as digests, so that comparing takes
the same time whatever the length and nothing here can print one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from headrace.entrypoints.dashboard.static import STATIC_PATHS
from headrace.observability.marks import CURRENT

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"}) | STATIC_PATHS


class KeyGuard:
    """Decides whether a request may pass.

    Args:
        keys: accepted keys; none at all lets everybody pass.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def allows(self, path: str, authorization: bytes | None) -> bool:
        """Whether a call of ``path`` with this ``Authorization`` header may pass."""
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, token = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        # Every key is compared, so that the time does not say which one matched.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)

    def owner(self, authorization: bytes | None) -> str | None:
        """A name for the key that an allowed call came with; ``None`` while there are no several keys to tell apart."""
        if len(self._digests) < 2:
            return None
        token = (authorization or b"").partition(b" ")[2]
        return hashlib.sha256(token.strip()).hexdigest()[:16]


def get_owner() -> str | None:
    """The key that the request at hand came with, by its name."""
    marks = CURRENT.get()
    return marks.owner if marks is not None else None
