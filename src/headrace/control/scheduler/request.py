"""One request as the scheduler sees it, and the table of its legal moves.

One number drives everything: ``num_computed_tokens``, which each step brings closer to the tokens that there are. It
is optimistic (advanced when a step is scheduled); ``num_committed_tokens`` follows when the step has been committed.
"""

from __future__ import annotations

from enum import Enum, auto

from headrace.control.kv_cache.hashing import ExtraKey, HashChain
from headrace.control.scheduler.recorder import WaitReason
from headrace.messages.outputs import FinishReason, RequestTimes
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import PromptLogprobs, TokenLogprobs


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = auto()
    WAITING_FOR_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


S = RequestStatus
FINISHED = frozenset({S.FINISHED_STOPPED, S.FINISHED_LENGTH, S.FINISHED_ABORTED, S.FINISHED_ERROR})
_ENDED = frozenset({S.FINISHED_ABORTED, S.FINISHED_ERROR})

LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    S.WAITING: frozenset({S.RUNNING, S.WAITING_FOR_REMOTE_KVS}) | _ENDED,
    S.WAITING_FOR_GRAMMAR: frozenset({S.WAITING}) | _ENDED,
    S.WAITING_FOR_REMOTE_KVS: frozenset({S.WAITING, S.PREEMPTED}) | _ENDED,
    S.RUNNING: frozenset({S.PREEMPTED}) | FINISHED,
    # Tokens of steps in flight are still delivered to a preempted request, and may be its last.
    S.PREEMPTED: frozenset({S.RUNNING, S.WAITING_FOR_REMOTE_KVS}) | FINISHED,
    **{status: frozenset() for status in FINISHED},
}

STATUS_OF_REASON = {
    FinishReason.STOP: S.FINISHED_STOPPED,
    FinishReason.LENGTH: S.FINISHED_LENGTH,
    FinishReason.ABORT: S.FINISHED_ABORTED,
    FinishReason.ERROR: S.FINISHED_ERROR,
}


class Request:
    """A request for life.

    Attributes:
        token_ids: prompt, then outputs that are certain.
        max_total_tokens: it ends when it has this many tokens.
        num_computed_tokens: with KV, counting steps in flight.
        num_committed_tokens: with KV, counting committed steps only.
        num_output_placeholders: tokens that steps in flight will sample.
        num_draft_placeholders: drafts in steps in flight; the length is unknown until they are judged.
        spec_token_ids: drafts to verify in the next step.
        num_slots: tokens for which its blocks have room.
        num_in_flight: steps in flight that contain it.
        last_step: the last step that contained it.
        ended: whether the status is a finished one.
        streams: runs, and its last output was a plain token: the next one probably is one too.
        discard_until: results of steps up to this one are dropped (the explicit mark).
        needs_row: the runner must get it whole before its next tokens.
        num_external_tokens: loaded by the connector.
        loads_in_step: a step in flight loads them, and has yet to say whether they are valid.
        rank: order of arrival.
    """

    __slots__ = (
        "admitted_before",
        "deadline",
        "discard_until",
        "ended",
        "first_scheduled",
        "first_token",
        "has_row",
        "hash_chain",
        "last_step",
        "last_token",
        "loads_in_step",
        "max_total_tokens",
        "needs_row",
        "no_external_hit",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_draft_placeholders",
        "num_external_tokens",
        "num_in_flight",
        "num_lost_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "prompt_logprobs",
        "queued",
        "rank",
        "record",
        "request_id",
        "spec_token_ids",
        "status",
        "stop_ids",
        "streams",
        "token_ids",
        "uses_grammar",
        "wait_reason",
    )

    def __init__(
        self, record: EngineCoreRequest, *, rank: int, now: float, max_model_len: int, block_size: int
    ) -> None:
        sampling = record.sampling
        prompt = record.prompt_token_ids
        self.record = record
        self.request_id = record.request_id
        self.rank = rank
        self.status = RequestStatus.WAITING
        self.ended = False
        self.streams = False
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        # A request for 0 tokens is run for its prompt alone; the sampled token is dropped.
        room = max_model_len - len(prompt) if sampling.max_tokens is None else max(1, sampling.max_tokens)
        self.max_total_tokens = max(len(prompt) + 1, min(len(prompt) + room, max_model_len))
        self.stop_ids = frozenset(record.eos_token_ids) | frozenset(sampling.stop_token_ids)
        self.uses_grammar = sampling.structured_outputs is not None
        self.hash_chain = HashChain(block_size, _extra_keys(record), record.owner)
        self.prompt_logprobs: list[TokenLogprobs] | None = None if sampling.prompt_logprobs is None else []
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0
        self.num_output_placeholders = 0
        self.num_draft_placeholders = 0
        self.spec_token_ids: list[int] = []
        self.num_slots = 0
        self.num_in_flight = 0
        self.last_step = -1
        self.discard_until = -1
        self.has_row = False
        self.needs_row = True
        self.no_external_hit = False
        self.num_external_tokens = 0
        self.loads_in_step = False
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.admitted_before = False
        self.deadline: float | None = None
        self.wait_reason: WaitReason | None = None
        self.queued = now
        self.first_scheduled = 0.0
        self.first_token = 0.0
        self.last_token = 0.0

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Tokens that are certain."""
        return len(self.token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens to compute: certain, being sampled, drafted."""
        return len(self.token_ids) + self.num_output_placeholders + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Outputs that are certain."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def takes_hits(self) -> bool:
        """Prompt logprobs need the logits of every prompt row, so no row may be skipped until they are complete."""
        return self.prompt_logprobs is None

    def move(self, status: RequestStatus) -> None:
        """Change the status along the table."""
        assert status in LEGAL_MOVES[self.status], f"{self.request_id}: {self.status.name} -> {status.name}"
        self.status = status
        self.ended = status in FINISHED
        self.streams = False

    def num_to_compute(self) -> int:
        """Tokens that a step could compute now; never past the last one that can matter."""
        room = self.max_total_tokens - 1 - self.num_computed_tokens
        return min(self.num_tokens_with_spec - self.num_computed_tokens, room)

    def restart(self, num_computed_tokens: int) -> None:
        """Go on from ``num_computed_tokens`` with what is certain; results of steps in flight are dropped."""
        self.num_computed_tokens = num_computed_tokens
        self.num_committed_tokens = min(self.num_committed_tokens, num_computed_tokens)
        self.num_output_placeholders = 0
        self.num_draft_placeholders = 0
        self.spec_token_ids = []
        self.discard_until = self.last_step
        self.needs_row = True

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Keep what is new; a recomputed chunk repeats what is here."""
        if self.prompt_logprobs is None:
            return
        known = len(self.prompt_logprobs)
        assert chunk.start <= known + 1, f"prompt logprobs of {self.request_id} skip positions"
        self.prompt_logprobs.extend(chunk.entries[known + 1 - chunk.start :])

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Hand out the complete prompt logprobs, once."""
        entries, self.prompt_logprobs = self.prompt_logprobs, None
        return None if entries is None else PromptLogprobs(1, entries)

    def make_times(self) -> RequestTimes:
        """Milestones so far."""
        return RequestTimes(
            arrival=self.record.arrival_time,
            queued=self.queued,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            num_preemptions=self.num_preemptions,
        )


def _extra_keys(record: EngineCoreRequest) -> list[ExtraKey]:
    keys: list[ExtraKey] = []
    if record.lora_name is not None:
        keys.append(ExtraKey("lora", record.lora_name))
    if record.cache_salt is not None:
        keys.append(ExtraKey("salt", record.cache_salt))
    return keys
