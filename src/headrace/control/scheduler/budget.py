"""What a step may hold: the two budgets, and the share that prompts may take beside running streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_FIRST_PROMPT_SHARE = 64
# How many steps of each kind are remembered, and for how many with prompts in a row the base is believed.
_NUM_PLAIN = 9
_NUM_MIXED = 15
_MAX_MIXED_STEPS = 32
# Of two steps the quicker one counts, so that one hiccup does not set the pace.
_NUM_FRESH = 2
_MAX_GROWTH = 1.5
# Chunks larger than any lately are approached in steps: what they would cost is a guess from smaller ones.
_CHUNK_GROWTH = 2.0


class StepBudget:
    """Budgets of one step.

    ``tokens`` is charged with granted tokens; ``inputs`` with tokens plus ``draft_slots`` for each request; ``prompt``
    bounds the tokens of prompt chunks.
    """

    __slots__ = ("draft_slots", "inputs", "prompt", "tokens")

    def __init__(self, tokens: int, inputs: int, draft_slots: int, prompt: int) -> None:
        self.tokens = tokens
        self.inputs = inputs
        self.draft_slots = draft_slots
        self.prompt = prompt

    @property
    def room(self) -> int:
        """Most tokens that one more request may get."""
        return min(self.tokens, self.inputs - self.draft_slots)

    def charge(self, num_tokens: int) -> None:
        """Take a request's tokens."""
        self.tokens -= num_tokens
        self.inputs -= num_tokens + self.draft_slots


class StepCost:
    """Learns what a step costs: a base for a step of running streams alone, and a price for each prompt token.

    Pure: it sees durations and counts, never a clock. Both are medians of recent steps (the price's weighs each step by
    its prompt tokens, for the fewer they are the more of the difference is chance), since a step may be held up by
    anything on the machine. The base is learnt from steps without prompts and is never more than a step with some took;
    `is_stale` asks for steps without when many had prompts, or when there are far more or fewer streams now.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_NUM_PLAIN)
        self._mixed: deque[tuple[float, int]] = deque(maxlen=_NUM_MIXED)
        self._base_s: float | None = None
        self._num_streams = 1
        self._num_mixed = 0
        self._num_wanted = _NUM_FRESH

    def is_stale(self, num_streams: int) -> bool:
        """Whether it is not known what ``num_streams`` cost alone."""
        return self._num_wanted > 0 or self._has_grown(num_streams)

    def _has_grown(self, num_streams: int) -> bool:
        return not self._num_streams / _MAX_GROWTH <= num_streams <= self._num_streams * _MAX_GROWTH

    def record(self, duration_s: float, num_prompt_tokens: int, num_requests: int = 1) -> None:
        """Learn from a step that took ``duration_s`` and computed ``num_prompt_tokens`` of prompt chunks."""
        if duration_s <= 0.0:
            return
        if num_prompt_tokens:
            self._learn_price(duration_s, num_prompt_tokens)
            self._num_mixed += 1
            if self._num_mixed == _MAX_MIXED_STEPS:
                self._num_wanted = _NUM_FRESH
            return
        if self._has_grown(num_requests) or (self._num_wanted and self._num_mixed):
            self._plain.clear()
            self._num_wanted = _NUM_FRESH
        self._num_streams, self._num_mixed = num_requests, 0
        self._num_wanted = max(0, self._num_wanted - 1)
        self._plain.append(duration_s)
        if not self._num_wanted or self._base_s is None:
            self._base_s = sorted(self._plain)[(len(self._plain) - 1) // 2]

    def _learn_price(self, duration_s: float, num_tokens: int) -> None:
        base_s = self._base_s or 0.0
        if duration_s > base_s:
            self._mixed.append(((duration_s - base_s) / num_tokens, num_tokens))
        else:
            # The machine has become faster, and tokens are not free.
            self._base_s = duration_s

    def scaled_gap(self, factor: float) -> float | None:
        """Seconds of ``factor`` steps of streams alone; ``None`` while those are unknown."""
        return None if self._base_s is None else factor * self._base_s

    def max_prompt_tokens(self, gap_s: float, at_least: int, urgency: float = 1.0) -> int:
        """Prompt tokens that a step of at most ``gap_s`` has room for.

        Args:
            at_least: never fewer, so that prompts advance.
            urgency: how much faster than usual chunks may grow.
        """
        if not self._mixed:
            return max(at_least, _FIRST_PROMPT_SHARE)
        room_s = gap_s - (self._base_s or 0.0)
        largest = max(num_tokens for _, num_tokens in self._mixed)
        room = min(room_s / _weighted_median(self._mixed), _CHUNK_GROWTH * urgency * largest)
        return max(at_least, int(room))


def _weighted_median(values: Iterable[tuple[float, int]]) -> float:
    """The value at which half of the weights is reached."""
    ordered = sorted(values)
    rest = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        rest -= weight
        if rest <= 0:
            return value
    raise AssertionError("weights are positive")
