"""What others may ask the flight recorder: read-only answers as plain data, by topic.

The core answers these between two steps, so each answer is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.base.clock import Clock
from headrace.observability.flight_recorder.recorder import FlightRecorder
from headrace.observability.flight_recorder.records import RequestLog, StepRecord
from headrace.observability.flight_recorder.timeline import core_spans, phase_sums

MAX_STEPS_ANSWERED = 512
MAX_SPANS = 4096
MAX_REQUESTS = 512

View = Callable[[str | None], Any]


class RecorderViews:
    """Answers by topic.

    Args:
        recorder: to look at.
        clock: says now, for requests that live.
    """

    def __init__(self, recorder: FlightRecorder, clock: Clock) -> None:
        self._recorder = recorder
        self._clock = clock

    def topics(self) -> dict[str, View]:
        """Topic to answer; the argument is the query's."""
        return {"explain": self._explain, "steps": self._steps, "requests": self._requests, "trace": self._trace}

    def _explain(self, request_id: str | None) -> dict[str, Any] | None:
        """The core's part of a request's timeline; ``None`` for one that is unknown or forgotten."""
        log = self._recorder.get_request(request_id or "")
        if log is None:
            return None
        now = self._clock.monotonic()
        steps = self._recorder.steps
        spans = core_spans(log, steps, now)
        return {
            **_describe(log),
            "now": now,
            "forgotten_before": steps[0].scheduled if steps and steps[0].step_id else 0.0,
            "spans": [span.as_dict() for span in spans[:MAX_SPANS]],
            "phases_ms": phase_sums(log, steps, now),
            "grants": _grants(log, steps),
            "prefix": log.prefix,
            "admissions": [
                {"time": a.time, "step": a.step_id, "local_hit": a.local_hit, "external_hit": a.external_hit}
                for a in log.admissions
            ],
            "preemptions": [
                {"time": p.time, "step": p.step_id, "cause": p.cause, "for": p.beneficiary} for p in log.preemptions
            ],
        }

    def _steps(self, after: str | None) -> list[dict[str, Any]]:
        """Steps with a greater id than ``after``, or the latest ones, oldest first."""
        steps = self._recorder.steps
        first = max(0, len(steps) - MAX_STEPS_ANSWERED)
        if after:
            wanted = int(after)
            while first < len(steps) and steps[first].step_id <= wanted:
                first += 1
        return [step.as_dict() for step in steps[first:]]

    def _requests(self, argument: str | None) -> list[dict[str, Any]]:
        """Requests that live, then those that ended, latest first."""
        recorder = self._recorder
        logs = [*reversed(recorder.live.values()), *reversed(recorder.finished.values())]
        latest = recorder.steps[-1].head_reason if recorder.steps else None
        return [_describe(log, latest or "") for log in logs[:MAX_REQUESTS]]

    def _trace(self, argument: str | None) -> dict[str, Any]:
        """All that a trace viewer can show."""
        return self.trace_all(MAX_REQUESTS, MAX_STEPS_ANSWERED)

    def trace_all(self, max_requests: int = 1 << 40, max_steps: int = 1 << 40) -> dict[str, Any]:
        """Steps and requests with their spans, the newest so many."""
        recorder, now = self._recorder, self._clock.monotonic()
        logs = [*recorder.finished.values(), *recorder.live.values()][-max_requests:]
        detailed: list[StepRecord] = recorder.steps[-max_steps:]
        since = detailed[0].scheduled if detailed else 0.0
        return {
            "steps": [step.as_dict() for step in detailed],
            "requests": [
                {**_describe(log), "spans": [s.as_dict() for s in core_spans(log, recorder.steps, now)[:MAX_SPANS]]}
                for log in logs
                if not log.finished or log.finished >= since
            ],
        }


def _grants(log: RequestLog, steps: list[StepRecord]) -> list[tuple[int, int]]:
    """Steps of late that granted the request tokens, and how many."""
    found = []
    for step in reversed(steps):
        if step.granted is None or step.scheduled < log.queued:
            break
        if (count := step.granted.get(log.request_id)) is not None:
            found.append((step.step_id, count))
    return found[::-1]


def _describe(log: RequestLog, shared_reason: str = "") -> dict[str, Any]:
    """A request in short; ``shared_reason`` is why the head of the queue waits, and with it those behind."""
    own = log.waits[-1][1] if log.waits else shared_reason
    return {
        "request_id": log.request_id,
        "state": log.state,
        "num_prompt_tokens": log.num_prompt_tokens,
        "num_output_tokens": log.num_output_tokens,
        "queued": log.queued,
        "admitted": log.admissions[0].time if log.admissions else 0.0,
        "finished": log.finished,
        "finish_reason": log.finish_reason,
        "num_preemptions": len(log.preemptions),
        "local_hit": log.prefix.get("local_hit", 0),
        "waiting": own if log.state in ("waiting", "preempted") else "",
    }
