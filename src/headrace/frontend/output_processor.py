"""The core's messages to outputs of requests.

Owns the table of requests that the core may still speak of. A request enters it before it is sent and leaves it the
moment it ends here, whoever ends it; news of ids that are not in the table is old and ignored. Knows nothing of
transport or event loops: `process` is a plain function over a message, so ``AsyncLLM`` and ``LLM`` share it.

A fault in the work for one request (its text, its logprobs) ends that request and no other.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from headrace.base.logging import get_logger
from headrace.frontend.answer import Answer
from headrace.frontend.fan_out import RequestGroup
from headrace.frontend.observer import RequestObserver
from headrace.messages.outputs import EngineCoreOutput, FinishReason, RequestTimes

logger = get_logger(__name__)


class OutputProcessor:
    """Routes news to answers.

    ``num_unstarted_tokens`` counts prompt tokens of answers without a token so far, ``num_finished`` all that ended.
    """

    def __init__(self, observer: RequestObserver) -> None:
        self._observer = observer
        self._answers: dict[str, tuple[Answer, RequestGroup]] = {}
        self._unstarted: dict[str, int] = {}
        self.num_unstarted_tokens = 0
        self.num_finished = 0

    @property
    def num_requests(self) -> int:
        """Answers that live."""
        return len(self._answers)

    @property
    def num_unstarted(self) -> int:
        """Answers without a token so far."""
        return len(self._unstarted)

    def add(self, group: RequestGroup) -> None:
        """Register a group; must precede sending it."""
        for answer, child in zip(group.answers, group.children, strict=True):
            assert answer.request_id not in self._answers, answer.request_id
            self._answers[answer.request_id] = (answer, group)
            self._unstarted[answer.request_id] = group.num_prompt_tokens
            self.num_unstarted_tokens += group.num_prompt_tokens
            prompt = 0 if answer.index else group.num_prompt_tokens
            self._observer.request_started(answer.request_id, prompt, len(group.answers), child.sampling.max_tokens)

    def process(self, outputs: Iterable[EngineCoreOutput], now: float) -> list[str]:
        """Take a message's news and return the ids that the core must abort, because they ended here first."""
        aborts: list[str] = []
        touched: dict[RequestGroup, None] = {}
        known = self._answers
        for output in outputs:
            entry = known.get(output.request_id)
            if entry is None:
                continue
            answer, group = entry
            try:
                if output.prompt_logprobs is not None:
                    group.add_prompt_logprobs(output.prompt_logprobs)
                kept = answer.add(output)
            except Exception as error:
                # The request's border: a fault in its text or logprobs must not reach its neighbours.
                logger.exception("request %s: processing its output failed", answer.request_id)
                answer.finish(FinishReason.ERROR, error=f"processing the output failed: {type(error).__name__}")
                kept = 0
            if kept or (output.new_token_ids and not answer.first_token_time):
                self._note_tokens(answer, group, kept, now)
            if output.error is not None:
                logger.error("request %s (%s) failed: %s", group.external_id, output.request_id, output.error)
            if answer.finish_reason is not None:
                self._end(answer, group, output, now)
                if output.finish_reason is None:
                    aborts.append(answer.request_id)
            touched[group] = None
        for group in touched:
            group.announce()
        return aborts

    def _note_tokens(self, answer: Answer, group: RequestGroup, kept: int, now: float) -> None:
        if not answer.first_token_time:
            answer.first_token_time = now
            self._note_started(answer)
        answer.last_token_time = now
        cached = 0 if answer.index else answer.num_cached_tokens
        self._observer.tokens_arrived(answer.request_id, kept, group.arrival, now, cached)

    def _note_started(self, answer: Answer) -> None:
        self.num_unstarted_tokens -= self._unstarted.pop(answer.request_id, 0)

    def _end(self, answer: Answer, group: RequestGroup, output: EngineCoreOutput | None, now: float) -> None:
        """The one way out of the table for an answer that has ended; ``output`` is the news that ended it, if any."""
        del self._answers[answer.request_id]
        self._note_started(answer)
        self.num_finished += 1
        assert answer.finish_reason is not None
        times = answer.times or RequestTimes(arrival=group.arrival, first_token=answer.first_token_time)
        if output is None or output.finish_reason is None:
            # It ended here before the core knew, so the last milestone is the one that was seen from here.
            times = replace(times, last_token=answer.last_token_time)
        group.note_end(times, output.kv_transfer_params if output is not None else None)
        reason = answer.finish_reason.value
        self._observer.request_finished(answer.request_id, reason, group.arrival, now, times)

    def end(self, group: RequestGroup, reason: FinishReason, now: float, error: str | None = None) -> list[str]:
        """End a group's living answers and return their ids. Idempotent."""
        ended = []
        for answer in group.answers:
            if answer.request_id not in self._answers:
                continue
            if reason is FinishReason.ABORT:
                answer.abort()
            else:
                answer.finish(reason, error=error)
            self._end(answer, group, None, now)
            ended.append(answer.request_id)
        if ended:
            group.announce()
        return ended

    def groups(self) -> list[RequestGroup]:
        """Groups with living answers."""
        return list({id(group): group for _, group in self._answers.values()}.values())

    def check_invariants(self) -> None:
        """Assert that the counters equal what the table says."""
        unstarted = {answer.request_id for answer, _ in self._answers.values() if not answer.num_tokens}
        assert self._unstarted.keys() == unstarted, (self._unstarted, unstarted)
        assert self.num_unstarted_tokens == sum(self._unstarted.values())
        for group in self.groups():
            alive = sum(answer.request_id in self._answers for answer in group.answers)
            assert group.num_live == alive, (group.num_live, alive)
