"""What a step may hold: the two budgets, and the share that prompts may take beside running streams."""

from __future__ import annotations

_FIRST_PROMPT_SHARE = 64
_MEMORY = 0.2
# A step may be held up by anything on the machine; what it teaches is bounded, so that one hiccup starves no prompt.
_MAX_SURPRISE = 3.0
_MAX_MIXED_STEPS = 64
_MAX_GROWTH = 1.5


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

    Pure: it sees durations and counts, never a clock. Recent steps weigh more. The base is learnt only from steps
    without prompts; `is_stale` asks for one when many had prompts, or when there are far more or fewer streams now.
    """

    def __init__(self) -> None:
        self._base_s: float | None = None
        self._per_token_s: float | None = None
        self._num_streams = 1
        self._num_mixed = 0

    def is_stale(self, num_streams: int) -> bool:
        """Whether it is not known what ``num_streams`` cost alone."""
        grown = not self._num_streams / _MAX_GROWTH <= num_streams <= self._num_streams * _MAX_GROWTH
        return grown or self._num_mixed >= _MAX_MIXED_STEPS

    def record(self, duration_s: float, num_prompt_tokens: int, num_requests: int = 1) -> None:
        """Learn from a step that took ``duration_s`` and computed ``num_prompt_tokens`` of prompt chunks."""
        if duration_s <= 0.0:
            return
        if num_prompt_tokens:
            extra = max(0.0, duration_s - (self._base_s or 0.0))
            self._per_token_s = _blend(self._per_token_s, extra / num_prompt_tokens)
            self._num_mixed += 1
        else:
            self._base_s = duration_s if self.is_stale(num_requests) else _blend(self._base_s, duration_s)
            self._num_streams, self._num_mixed = num_requests, 0

    def scaled_gap(self, factor: float) -> float | None:
        """Seconds of ``factor`` steps of streams alone; ``None`` while those are unknown."""
        return None if self._base_s is None else factor * self._base_s

    def max_prompt_tokens(self, gap_s: float, at_least: int) -> int:
        """Prompt tokens that a step of at most ``gap_s`` has room for; never under ``at_least``, so prompts advance."""
        if self._per_token_s is None:
            return max(at_least, _FIRST_PROMPT_SHARE)
        room_s = gap_s - (self._base_s or 0.0)
        return max(at_least, int(room_s / max(self._per_token_s, 1e-9)))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _MEMORY * (min(new, _MAX_SURPRISE * old) - old)
