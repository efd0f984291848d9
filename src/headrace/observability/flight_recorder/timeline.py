"""From the recorder's records to a timeline: which cause each moment of a request belongs to, in the core.

Pure. A request's life in the core is cut at its admissions and preemptions; waiting parts are cut again where the
reason changes, running parts at the commits of steps. Steps overlap when several are in flight, so a step owns the time
from the commit before it to its own: what ran then ran for it. Every span names one cause; what nothing explains stays
a gap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.observability.flight_recorder.records import PHASES, RequestLog, StepRecord


@dataclass(slots=True)
class Span:
    """A stretch of time with one cause."""

    cause: str
    start: float
    end: float
    detail: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the message."""
        return {
            "cause": self.cause,
            "start": self.start,
            "end": self.end,
            "detail": self.detail,
            "num_steps": self.num_steps,
        }


def core_spans(log: RequestLog, steps: Sequence[StepRecord], now: float) -> list[Span]:
    """The spans of a request from its arrival in the core to its end, or to ``now`` while it lives."""
    end = log.finished or now
    spans: list[Span] = []
    cursor = log.queued
    preemptions = iter(log.preemptions)
    preempted = None
    for admission in log.admissions:
        if preempted is None:
            spans += _waiting(log, steps, cursor, admission.time)
        else:
            detail = {"cause": preempted.cause, "for": preempted.beneficiary, "step": preempted.step_id}
            spans.append(Span("preempted", cursor, admission.time, detail))
        preempted = next(preemptions, None)
        cursor = preempted.time if preempted is not None else end
        spans += _running(log, steps, admission.time, cursor, resumed=admission.resumed)
    if not log.admissions:
        spans += _waiting(log, steps, cursor, end)
    elif preempted is not None:
        detail = {"cause": preempted.cause, "for": preempted.beneficiary, "step": preempted.step_id}
        spans.append(Span("preempted", cursor, end, detail))
    return merge_spans(spans)


def merge_spans(spans: list[Span]) -> list[Span]:
    """Join neighbours of one cause and leave out empty ones."""
    merged: list[Span] = []
    for span in spans:
        if span.end <= span.start:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.cause == span.cause and last.detail == span.detail and last.end == span.start:
            last.end = span.end
            last.num_steps += span.num_steps
        else:
            merged.append(span)
    return merged


def _waiting(log: RequestLog, steps: Sequence[StepRecord], start: float, end: float) -> Iterator[Span]:
    """Time before the first admission, by reason; without one of its own a request shares that of the head."""
    own = [(time, reason) for time, reason in log.waits if start <= time < end]
    changes = [(start, "next_step")]
    first_own = own[0][0] if own else end
    for step in _from(steps, start):
        if step.scheduled >= first_own:
            break
        if step.head_reason is not None and step.head_reason != changes[-1][1]:
            changes.append((step.scheduled, step.head_reason))
    changes += own
    for (begin, reason), (stop, _) in zip(changes, [*changes[1:], (end, "")], strict=True):
        yield Span(f"waiting_{reason}", begin, stop)


def _running(
    log: RequestLog, steps: Sequence[StepRecord], start: float, end: float, *, resumed: bool
) -> Iterator[Span]:
    """Time between an admission and the end or a preemption."""
    cursor = start
    place = _place(steps, start)
    earlier = (steps[index].committed for index in range(place - 1, -1, -1))
    previous = next((committed for committed in earlier if committed), 0.0)
    failed = False
    for step in steps[place:]:
        if cursor >= end:
            return
        if not step.committed:
            failed = True
            continue
        began = max(step.scheduled, previous, cursor)
        if step.scheduled > cursor:
            yield Span("failed_step" if failed else "between_steps", cursor, min(step.scheduled, end))
            cursor = min(step.scheduled, end)
        if began > cursor:
            yield Span("step_in_flight", cursor, min(began, end))
        stop = min(step.committed, end)
        if stop > began:
            yield Span(_cause_in(step, log.request_id, resumed=resumed), began, stop, num_steps=1)
        cursor = max(cursor, stop)
        previous = step.committed
        failed = False
    if cursor < end and not log.finished:
        yield Span("step_running", cursor, end)
    elif cursor < end and failed:
        yield Span("failed_step", cursor, end)


def _cause_in(step: StepRecord, request_id: str, *, resumed: bool) -> str:
    if request_id in step.chunks:
        return "recompute" if resumed else "prefill"
    if request_id in step.skipped:
        return f"not_granted_{step.skipped[request_id]}"
    return "decode_beside_prefill" if step.chunks else "decode"


def _from(steps: Sequence[StepRecord], time: float) -> Iterator[StepRecord]:
    for index in range(_place(steps, time), len(steps)):
        yield steps[index]


def _place(steps: Sequence[StepRecord], time: float) -> int:
    return bisect_left(steps, time, key=lambda step: step.scheduled)


def phase_sums(log: RequestLog, steps: Sequence[StepRecord], now: float) -> dict[str, float]:
    """Milliseconds of each phase, over the steps that ran while the request did."""
    sums = [0.0] * len(PHASES)
    if log.admissions:
        end = log.finished or now
        for step in _from(steps, log.admissions[0].time):
            if step.scheduled >= end:
                break
            if request_takes_part(step, log.request_id):
                sums = [total + seconds for total, seconds in zip(sums, step.phases, strict=True)]
    return {name: 1e3 * total for name, total in zip(PHASES, sums, strict=True)}


def request_takes_part(step: StepRecord, request_id: str) -> bool:
    """Whether a request that runs was granted tokens in a step."""
    return bool(step.committed) and request_id not in step.skipped
