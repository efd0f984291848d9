"""Finds the request that breaks a step, so that only it ends.

When a forward or its sampling raises, whatever is in flight behind it runs out and is dropped, and the scheduler
takes all these steps back. The failed step's requests are then run again in halves until the culprit is alone; it
ends with the cause. Each part is a step like any other, scheduled and committed on its own: rows are sent whole
again, positions and random numbers are absolute, so it does not matter how far a failed attempt came, and the
survivors' tokens are those of an undisturbed run. A fault that does not recur has no culprit.

A request of a failed step that gave up its blocks meanwhile cannot be run again at once. It comes back in its own time,
and ends when it has been in three failed steps whose culprit was not found.

Attempts and time are bounded: what is still under suspicion then ends with the cause. A step that fails without any
request in it cannot be bisected and is fatal.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.clock import Clock
from headrace.base.errors import EngineDeadError
from headrace.base.logging import get_logger
from headrace.control.scheduler.scheduler import Scheduler
from headrace.core.pipeline import Pipeline, StepFailedError
from headrace.messages.outputs import EngineCoreOutput, FinishReason
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput

logger = get_logger(__name__)

MAX_ATTEMPTS = 64
MAX_SECONDS = 30.0
MAX_STRIKES = 3

Commit = Callable[[SchedulerOutput, ModelRunnerOutput], None]
Tell = Callable[[dict[int, list[EngineCoreOutput]]], None]


class StepRecovery:
    """See the module.

    Args:
        scheduler: takes steps back and schedules the parts.
        pipeline: runs them, one at a time.
        clock: bounds the time.
        commit: commits a part.
        tell: is given the last outputs of culprits.
    """

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline, clock: Clock, commit: Commit, tell: Tell) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._clock = clock
        self._commit = commit
        self._tell = tell
        self._strikes: dict[str, int] = {}

    def run(self, step: SchedulerOutput, cause: StepFailedError) -> None:
        """Deal with a failed step; raises `EngineDeadError` when the engine cannot go on."""
        self._pipeline.abandon()
        request_ids = self._scheduler.rewind(step)
        if not step.num_scheduled_tokens:
            raise EngineDeadError(f"a step without requests failed: {cause}") from cause
        elusive = [i for i in step.num_scheduled_tokens if i not in request_ids and self._scheduler.get_request(i)]
        logger.warning(
            "step %d failed; its %d requests are run again in parts: %s", step.step_id, len(request_ids), cause
        )
        deadline = self._clock.monotonic() + MAX_SECONDS
        suspects = [(half, str(cause)) for half in _halves(request_ids)]
        attempts, culprits = 0, 0
        while suspects:
            part, error = suspects.pop(0)
            if attempts < MAX_ATTEMPTS and self._clock.monotonic() <= deadline:
                attempts += 1
                failure = self._attempt(part)
                if failure is None:
                    continue
                if len(part) > 1:
                    suspects[:0] = [(half, failure) for half in _halves(part)]
                    continue
                error = failure
            culprits += len(part)
            self._tell(self._scheduler.finish_requests(part, FinishReason.ERROR, error))
        if not culprits:
            culprits = self._blame(elusive, str(cause))
        if culprits:
            logger.warning("%d of the requests of step %d ended with an error", culprits, step.step_id)
        else:
            logger.warning("the fault of step %d did not recur", step.step_id)

    def _blame(self, elusive: list[str], error: str) -> int:
        """End those that were in too many failed steps; returns how many."""
        counts = {i: n for i, n in self._strikes.items() if self._scheduler.get_request(i)}
        for request_id in elusive:
            counts[request_id] = counts.get(request_id, 0) + 1
        self._strikes = counts
        culprits = [i for i in elusive if counts[i] >= MAX_STRIKES]
        self._tell(self._scheduler.finish_requests(culprits, FinishReason.ERROR, error))
        return len(culprits)

    def _attempt(self, part: list[str]) -> str | None:
        """Run some requests alone; returns why that failed."""
        step = self._scheduler.schedule(self._clock.monotonic(), only=frozenset(part))
        if not step.num_scheduled_tokens and step.connector is None:
            return None
        self._pipeline.launch(step)
        flight = self._pipeline.take_oldest()
        assert flight is not None
        try:
            output = self._pipeline.wait(flight)
        except StepFailedError as error:
            self._scheduler.rewind(step)
            return str(error)
        self._commit(step, output)
        return None


def _halves(request_ids: list[str]) -> list[list[str]]:
    middle = (len(request_ids) + 1) // 2
    return [half for half in (request_ids[:middle], request_ids[middle:]) if half]
