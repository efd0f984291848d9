"""The grammars of living requests: their compilation, and a matcher each that follows the tokens.

Owns one matcher per request for life. It advances over committed tokens alone, so preemption, steps in flight and steps
that are run again leave it as it is: whatever is sampled next is sampled from a mask made after the last commit. Each
of the ``n`` answers of a request has its own. It knows nothing of threads, time or the library behind the protocol.

A matcher that fails gives a mask without any token; the sampler then ends that row and no other, and `get_error` says
why. One that raises is no different: here is the border behind which a grammar is its request's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.base.logging import get_logger
from headrace.control.grammar.protocol import Compilation, GrammarCompiler, Matcher
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

logger = get_logger(__name__)

_BITS = 32


@dataclass(slots=True)
class _Entry:
    """One request's grammar; the matcher is made when the grammar is first known to be good, and may fail later."""

    compilation: Compilation
    matcher: Matcher | None = None
    failure: str | None = None


class GrammarManager:
    """See the module.

    Args:
        compiler: does the work elsewhere.
        vocab_size: width of the logits.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        assert vocab_size > 0, vocab_size
        self._compiler = compiler
        self._num_words = -(-vocab_size // _BITS)
        self._entries: dict[str, _Entry] = {}

    def start(self, request: EngineCoreRequest) -> None:
        """Begin to compile."""
        params = request.sampling.structured_outputs
        assert params is not None and request.request_id not in self._entries, request.request_id
        self._entries[request.request_id] = _Entry(self._compiler.compile(params))

    def is_ready(self, request_id: str) -> bool:
        """Whether compilation has ended, well or not."""
        try:
            return self._entries[request_id].compilation.done
        except Exception:  # noqa: BLE001 - `get_error` meets it again and says it
            return True

    def get_error(self, request_id: str) -> str | None:
        """Why the grammar cannot be used, or ``None``, and then the request has its matcher."""
        entry = self._entries[request_id]
        try:
            error = entry.failure or entry.compilation.get_error()
            if error is None and entry.matcher is None:
                entry.matcher = entry.compilation.make_matcher()
        except Exception as raised:  # noqa: BLE001 - the request's border, see the module
            error = _describe(request_id, raised)
        return None if error is None else f"structured_outputs: {error}"

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        """Advance over committed tokens."""
        try:
            return self._matcher(request_id).accept(token_ids)
        except Exception as raised:  # noqa: BLE001 - the request's border, see the module
            return _describe(request_id, raised)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._entries.pop(request_id, None)

    def make_bitmask(self, step: SchedulerOutput) -> GrammarOutput:
        """Which tokens each of ``step.grammar`` may sample, given all tokens that are certain."""
        # A request that ended since the step was scheduled needs no mask: its token is dropped.
        request_ids = [request_id for request_id in step.grammar if request_id in self._entries]
        masks = np.zeros((len(request_ids), self._num_words), dtype=np.int32)
        for row, request_id in zip(masks, request_ids, strict=True):
            try:
                error = self._matcher(request_id).fill_mask(row)
            except Exception as raised:  # noqa: BLE001 - the request's border, see the module
                row.fill(0)
                error = _describe(request_id, raised)
            if error is not None:
                self._entries[request_id].failure = error
                logger.warning("request %s: its grammar failed: %s", request_id, error)
        return GrammarOutput(request_ids=request_ids, bitmask=masks.tobytes(), num_words=self._num_words)

    @property
    def num_requests(self) -> int:
        """Requests with a grammar, for tests: none may be left when they have ended."""
        return len(self._entries)

    def _matcher(self, request_id: str) -> Matcher:
        matcher = self._entries[request_id].matcher
        assert matcher is not None, f"{request_id} runs before its grammar was looked at"
        return matcher


def _describe(request_id: str, error: Exception) -> str:
    logger.error("request %s: its grammar raised", request_id, exc_info=error)
    return f"the grammar failed: {type(error).__name__}"
