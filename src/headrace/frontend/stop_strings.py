"""Stop strings in a growing text.

An Aho-Corasick automaton over all stop strings of a request: after each character its state is the longest suffix of
the text that begins some stop string. So the first match to *complete* is found at its last character, whatever the
cut of the text, and exactly the characters that may still become a stop string are held back. Each character costs
amortised constant time, however many and however long the stop strings are.

When several stop strings complete at one character the earlier in the list wins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The immutable part, shared by the answers of one request."""

    __slots__ = ("children", "fail", "first_chars", "held", "match", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops and all(stops), stops
        self.stops = tuple(stops)
        self.children: list[dict[str, int]] = [{}]
        self.match: list[int] = [-1]
        depth = [0]
        for index, stop in enumerate(self.stops):
            node = 0
            for char in stop:
                following = self.children[node].get(char)
                if following is None:
                    following = len(self.children)
                    self.children[node][char] = following
                    self.children.append({})
                    self.match.append(-1)
                    depth.append(depth[node] + 1)
                node = following
            if self.match[node] < 0:
                self.match[node] = index
        self.fail = [0] * len(self.children)
        self.held = [0] * len(self.children)
        self.first_chars = frozenset(self.children[0])
        self._link(depth)

    def _link(self, depth: list[int]) -> None:
        """Set, breadth first, where to go on a mismatch, the best match and how much is held at each node."""
        queue = deque([0])
        while queue:
            node = queue.popleft()
            fail = self.fail[node]
            if node:
                candidates = [index for index in (self.match[node], self.match[fail]) if index >= 0]
                self.match[node] = min(candidates, default=-1)
                self.held[node] = depth[node] if self.children[node] else self.held[fail]
            for char, child in self.children[node].items():
                if node:
                    self.fail[child] = self._step(fail, char)
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        """The longest suffix of ``node``'s string plus ``char`` that begins a stop string."""
        while node and char not in self.children[node]:
            node = self.fail[node]
        return self.children[node].get(char, 0)


class StopMatcher:
    """One answer's place in the automaton.

    ``matched`` is the stop string that ended the text, or ``None``. After a match nothing more may be pushed.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "matched")

    def __init__(self, automaton: StopAutomaton, include: bool) -> None:
        self._automaton = automaton
        self._include = include
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """Take new text and return what may be shown now.

        Args:
            armed: whether a stop string that completes in ``text`` counts (not before ``min_tokens``).
        """
        assert self.matched is None
        auto = self._automaton
        if not self._node and auto.first_chars.isdisjoint(text):
            return text
        children, fail, match = auto.children, auto.fail, auto.match
        node = self._node
        for position, char in enumerate(text):
            while node and char not in children[node]:
                node = fail[node]
            node = children[node].get(char, 0)
            if match[node] >= 0 and armed:
                self.matched = auto.stops[match[node]]
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(self.matched)]
        self._node = node
        seen = self._held + text
        shown = len(seen) - auto.held[node]
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """Return what was held back, at the end of a text without a match."""
        held, self._held = self._held, ""
        return held
