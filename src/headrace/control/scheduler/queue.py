"""The order of requests: a policy, and a queue that keeps it.

A request's place follows from its key alone, so a preempted request returns to its own place, and a request that must
step aside for a while loses nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from headrace.base.registry import Registry
from headrace.control.scheduler.request import Request

Key = tuple[float, ...]


class Policy(Protocol):
    """Orders requests: the smallest key is the most urgent. Keys are unique and never change."""

    def key(self, request: Request) -> Key:
        """The request's place."""
        ...


POLICIES: Registry[type[Policy]] = Registry("scheduling policy")


@POLICIES.register("fcfs")
class FcfsPolicy:
    """First come, first served."""

    def key(self, request: Request) -> Key:
        return (request.rank,)


@POLICIES.register("priority")
class PriorityPolicy:
    """Lower priority number first, then time of arrival, then order of arrival."""

    def key(self, request: Request) -> Key:
        return (request.record.priority, request.record.arrival_time, request.rank)


class RequestQueue:
    """Requests in the order of a policy. ``requests`` is for reading."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> Request:
        return self.requests[index]

    def add(self, request: Request) -> None:
        """Insert a request at its place."""
        insort(self.requests, request, key=self.policy.key)

    def remove(self, request: Request) -> bool:
        """Take a request out; ``False`` when it is not here."""
        key = self.policy.key
        index = bisect_left(self.requests, key(request), key=key)
        if index < len(self.requests) and self.requests[index] is request:
            del self.requests[index]
            return True
        return False
