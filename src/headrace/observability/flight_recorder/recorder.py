"""The flight recorder: what the engine decided and how long each part took, always on, in bounded memory.

The core owns it and calls it from one thread; others ask by message (`views`). A step costs a record and no look at its
requests: steady decode is what remains when the exceptions (chunks of prompts, requests that got nothing) are written
down. Timelines are made from the records when somebody asks (`timeline`), never before.

Nothing here blocks, raises or keeps text; token ids are held by reference while their request lives, to say where a
prompt left the cached one.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.messages.outputs import FinishReason, SchedulerStats
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import StepStats
from headrace.messages.scheduler_output import SchedulerOutput
from headrace.observability.buckets import STEP_TOKENS, Buckets
from headrace.observability.flight_recorder.block_index import BlockIndex
from headrace.observability.flight_recorder.block_residency import BlockResidency
from headrace.observability.flight_recorder.records import (
    PHASES,
    Admission,
    BlockCounts,
    Chain,
    Preemption,
    RequestLog,
    StepRecord,
)

MAX_STEPS = 8192
MAX_DETAILED_STEPS = 1024
MAX_FINISHED = 1024
MAX_WAITS = 256
_MAX_OPEN = 32


class FlightRecorder:
    """See the module. It is the scheduler's step recorder.

    Args:
        index: explains prefix misses; fed with the cache's events by whoever owns both.
        residency: measures how long blocks stay; fed likewise.
        max_steps: at least so many steps are kept, at most twice as many.
        max_finished: ended requests that can still be asked about.
    """

    def __init__(
        self,
        index: BlockIndex | None = None,
        *,
        residency: BlockResidency | None = None,
        max_steps: int = MAX_STEPS,
        max_finished: int = MAX_FINISHED,
    ) -> None:
        self.index = index if index is not None else BlockIndex()
        self.residency = residency if residency is not None else BlockResidency(0.0)
        self.steps: list[StepRecord] = []
        self.live: dict[str, RequestLog] = {}
        self.finished: dict[str, RequestLog] = {}
        self.phase_totals = dict.fromkeys(PHASES, 0.0)
        self.graph_modes: dict[str, int] = {}
        self.cause_totals: dict[str, float] = {}
        self.step_tokens = Buckets(STEP_TOKENS)
        self.last_commit = 0.0
        self.step_id = 0
        self._max_steps = max_steps
        self._max_finished = max_finished
        self._running: dict[str, None] = {}
        self._prefilling: dict[str, int | None] = {}
        self._open: dict[int, StepRecord] = {}
        self._admitted: list[str] = []
        self._preempted: list[tuple[str, str, str]] = []
        self._updated = 0.0
        self._latest: StepRecord | None = None

    # Requests

    def on_queued(self, record: EngineCoreRequest, chain: Chain, now: float) -> None:
        """A request came."""
        self.live[record.request_id] = RequestLog(
            record.request_id, len(record.prompt_token_ids), now, record=record, chain=chain
        )

    def on_waiting(self, request_id: str, reason: str, now: float) -> None:
        """The reason for which a request waits has changed."""
        log = self.live.get(request_id)
        if log is not None and len(log.waits) < MAX_WAITS:
            log.waits.append((now, _text(reason)))

    def on_admitted(
        self, request_id: str, local_hit: int, external_hit: int, missed: bytes | None, resumed: bool, now: float
    ) -> None:
        """A request runs, with this many tokens from the caches; ``missed`` is the first block hash not found here."""
        self._running[request_id] = None
        self._admitted.append(request_id)
        log = self.live.get(request_id)
        if log is None:
            return
        log.admissions.append(Admission(now, self.step_id, local_hit, external_hit, resumed))
        # How much a preempted request has to compute again is not known here: until it decodes.
        self._prefilling[request_id] = None if resumed else log.num_prompt_tokens - local_hit - external_hit
        if not resumed:
            log.prefix = self._explain_prefix(log, local_hit, external_hit, missed)
        if local_hit:
            self._note_hit(log, local_hit, now)

    def on_preempted(self, victim: str, cause: str, beneficiary: str, now: float) -> None:
        """``victim`` gave its blocks up for ``beneficiary``."""
        self._running.pop(victim, None)
        self._prefilling.pop(victim, None)
        self._preempted.append((victim, _text(cause), beneficiary))
        log = self.live.get(victim)
        if log is not None:
            log.preemptions.append(Preemption(now, self.step_id, _text(cause), beneficiary))

    def on_finished(self, request_id: str, reason: FinishReason, num_output_tokens: int, now: float) -> None:
        """A request ended."""
        self._running.pop(request_id, None)
        self._prefilling.pop(request_id, None)
        log = self.live.pop(request_id, None)
        if log is None:
            return
        log.finished, log.finish_reason, log.num_output_tokens = now, reason.value, num_output_tokens
        log.record = log.chain = None
        self.finished[request_id] = log
        if len(self.finished) > self._max_finished:
            del self.finished[next(iter(self.finished))]

    def _note_hit(self, log: RequestLog, local_hit: int, now: float) -> None:
        """The request has seen what it hit, whoever computed it."""
        chain = log.chain
        if chain is None or (chain.owner is None and not self.residency.active):
            return
        hashes = chain.hashes[: local_hit // chain.block_size]
        if chain.owner is not None:
            self.index.seen(hashes, chain.owner)
        self.residency.used(hashes, now)

    def _explain_prefix(
        self, log: RequestLog, local_hit: int, external_hit: int, missed: bytes | None
    ) -> dict[str, object]:
        prefix: dict[str, object] = {
            "num_prompt_tokens": log.num_prompt_tokens,
            "local_hit": local_hit,
            "external_hit": external_hit,
        }
        record, chain = log.record, log.chain
        assert record is not None and chain is not None
        size = chain.block_size
        place = local_hit // size
        if record.sampling.prompt_logprobs is not None:
            prefix["miss"] = {"reason": "prompt_logprobs"}
        elif not chain.hashes and log.num_prompt_tokens >= size:
            prefix["miss"] = {"reason": "caching_off"}
        elif missed is not None and place < (log.num_prompt_tokens - 1) // size:
            keys = tuple((key.kind, key.value) for key in chain.extra_keys)
            why = self.index.explain(missed, chain.hashes[:place], record.prompt_token_ids, size, keys, chain.owner)
            prefix["miss"] = {"block": place, "first_token": place * size, **why.as_dict()}
        return prefix

    # Steps

    def on_step(
        self,
        step: SchedulerOutput,
        blocks: BlockCounts,
        num_running: int,
        num_waiting: int,
        head_reason: str | None,
        ungranted: Mapping[str, str],
        now: float,
    ) -> None:
        """A step was scheduled."""
        granted = step.num_scheduled_tokens
        record = StepRecord(step.step_id, now)
        record.granted = granted
        record.num_requests = len(granted)
        record.num_tokens = step.total_num_scheduled_tokens
        record.num_running = num_running
        record.num_waiting = num_waiting
        if num_waiting and head_reason is not None:
            record.head_reason = _text(head_reason)
        if self._prefilling:
            self._note_chunks(record, granted)
        if ungranted:
            record.skipped = {r: _text(why) for r, why in ungranted.items() if r in self._running}
        if self._admitted:
            record.admitted, self._admitted = self._admitted, []
        if self._preempted:
            record.preempted, self._preempted = self._preempted, []
        _count_blocks(record, blocks)
        self.step_id = step.step_id + 1
        self._keep(record)

    def on_launched(self, step_id: int, now: float) -> None:
        """A step was handed to the executor."""
        record = self._open.get(step_id)
        if record is not None:
            record.phases[0] = now - record.scheduled

    def on_committed(self, step_id: int, blocks: BlockCounts, now: float) -> None:
        """A step was committed."""
        record = self._latest = self._open.pop(step_id, None)
        if record is None:
            return
        _count_blocks(record, blocks)
        record.committed = now
        self.step_tokens.observe(record.num_tokens)
        seconds = now - max(record.scheduled, self.last_commit)
        self.last_commit = now
        totals = self.cause_totals
        num_chunks = len(record.chunks)
        totals["prefill"] = totals.get("prefill", 0.0) + seconds * num_chunks
        totals["decode"] = totals.get("decode", 0.0) + seconds * (record.num_requests - num_chunks)
        if record.num_waiting:
            reason = f"waiting_{record.head_reason or 'next_step'}"
            totals[reason] = totals.get(reason, 0.0) + seconds * record.num_waiting

    def on_updated(self, step_id: int, stats: StepStats | None, kv_usage: float, now: float) -> None:
        """The commit of a step is through; ``stats`` is what its runner measured."""
        self._updated = now
        record = self._latest
        if record is None or record.step_id != step_id:
            return
        record.kv_usage = kv_usage
        phases = record.phases
        phases[4] = now - record.committed
        if stats is not None:
            phases[1], phases[2], phases[3] = stats.prepare_s, stats.forward_s, stats.sample_s
            record.graph_mode, record.graph_reason = stats.graph_mode, stats.graph_reason
            self.graph_modes[stats.graph_mode] = self.graph_modes.get(stats.graph_mode, 0) + 1

    def on_output(self, now: float) -> None:
        """The outputs of the latest step are ready to leave."""
        record, self._latest = self._latest, None
        if record is None:
            return
        record.phases[5] = now - self._updated
        totals = self.phase_totals
        for name, seconds in zip(PHASES, record.phases, strict=True):
            totals[name] += seconds

    def add_totals(self, stats: SchedulerStats) -> SchedulerStats:
        """The statistics with what was recorded since start."""
        return replace(
            stats,
            phase_seconds=dict(self.phase_totals),
            cause_seconds=dict(self.cause_totals),
            graph_steps=dict(self.graph_modes),
            histograms={"step_tokens": self.step_tokens.dump(), **self.residency.dump()},
        )

    def _note_chunks(self, record: StepRecord, granted: Mapping[str, int]) -> None:
        for request_id, remaining in list(self._prefilling.items()):
            count = granted.get(request_id, 0)
            if not count:
                continue
            if remaining is None and count == 1:
                del self._prefilling[request_id]
                continue
            record.chunks[request_id] = count
            if remaining is not None and count >= remaining:
                del self._prefilling[request_id]
            elif remaining is not None:
                self._prefilling[request_id] = remaining - count

    def _keep(self, record: StepRecord) -> None:
        steps = self.steps
        steps.append(record)
        if len(steps) > MAX_DETAILED_STEPS:
            steps[-1 - MAX_DETAILED_STEPS].granted = None
        if len(steps) >= 2 * self._max_steps:
            del steps[: self._max_steps]
        opened = self._open
        opened[record.step_id] = record
        if len(opened) > _MAX_OPEN:
            # Steps that failed are never committed.
            del opened[next(iter(opened))]

    # Looking

    def get_request(self, request_id: str) -> RequestLog | None:
        """The log of a request that lives or ended not long ago."""
        return self.live.get(request_id) or self.finished.get(request_id)

    def check_invariants(self) -> None:
        """Raise unless the logs agree with each other."""
        assert self._running.keys() <= self.live.keys()
        assert self._prefilling.keys() <= self._running.keys()
        ids = [step.step_id for step in self.steps]
        assert ids == sorted(ids) and len(ids) < 2 * self._max_steps
        assert len(self.finished) <= self._max_finished


def _count_blocks(record: StepRecord, blocks: BlockCounts) -> None:
    counts = record.blocks
    counts[0] += blocks.taken
    counts[1] += blocks.freed
    counts[2] += blocks.evicted
    counts[3] += blocks.cached


def _text(reason: str) -> str:
    """A reason may be a member of an enumeration of texts."""
    return str(getattr(reason, "value", reason))
