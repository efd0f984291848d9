"""Steps in flight between the scheduler and the executor, oldest first.

Owns the order of launches and samplings. A step is launched when there is room; the executor samples it in the same
call, so that the next forward can follow without a word from the host. Sampling that needs a grammar bitmask is a call
of its own: the bitmask depends on the tokens of the step before, so it waits until no older step is uncommitted, and
nothing is launched behind a step whose sampling waits.

At depth 1 there is room only when nothing is in flight: the loop waits for each step. Nothing here knows requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import EngineDeadError
from headrace.executor.base import Executor
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput

T = TypeVar("T")
HEALTH_INTERVAL_S = 1.0

MakeBitmask = Callable[[SchedulerOutput], GrammarOutput | None]


class StepFailedError(Exception):
    """A forward or a sampling raised; the executor lives on."""


@dataclass(slots=True)
class Flight:
    """One launched step. ``sampled`` is ``None`` while its sampling waits for a bitmask, or without grammar rows."""

    step: SchedulerOutput
    forward: Future[ModelRunnerOutput | None]
    sampled: Future[ModelRunnerOutput] | None = None


class Pipeline:
    """See the module.

    Args:
        executor: runs the steps in the order of the calls.
        depth: most steps in flight.
        make_bitmask: the grammar rows of a step, asked for only when every older step is committed.
    """

    def __init__(self, executor: Executor, depth: int, make_bitmask: MakeBitmask) -> None:
        assert depth >= 1, depth
        self._executor = executor
        self._depth = depth
        self._make_bitmask = make_bitmask
        self._flights: deque[Flight] = deque()
        self._news: list[ConnectorOutput] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched."""
        flights = self._flights
        return len(flights) < self._depth and not (flights and _waits(flights[-1]))

    def launch(self, step: SchedulerOutput) -> None:
        """Start a step and, unless it must wait, the sampling of one with grammar rows."""
        assert self.has_room
        flight = Flight(step, self._executor.execute_model(step, non_block=True))
        self._flights.append(flight)
        if _waits(flight) and len(self._flights) == 1:
            self._sample(flight)

    def take_oldest(self) -> Flight | None:
        """The step to commit next, or ``None`` when nothing is in flight; it leaves the pipeline."""
        return self._flights.popleft() if self._flights else None

    def committed(self) -> None:
        """The step taken last has been committed: sampling that waited for it may go."""
        if self._flights and _waits(self._flights[0]):
            self._sample(self._flights[0])

    def wait(self, flight: Flight) -> ModelRunnerOutput:
        """The step's result.

        Raises:
            StepFailedError: its forward or sampling raised, and nothing of it is left to run.
            EngineDeadError: the executor is gone.
        """
        try:
            output = self._result(flight.forward)
            if output is None:
                assert flight.sampled is not None
                output = self._result(flight.sampled)
        except EngineDeadError:
            raise
        except Exception as error:
            self._executor.check_health()
            if flight.sampled is not None:
                self._settle(flight.sampled)
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        return self._with_news(output)

    def abandon(self) -> None:
        """Let everything in flight run out and drop the results, but not the connector's news, which come only once."""
        flights, self._flights = self._flights, deque()
        for flight in flights:
            if _waits(flight):
                flight.sampled = self._executor.sample_tokens(None)
            for future in (flight.forward, flight.sampled):
                output = self._settle(future) if future is not None else None
                if output is not None and output.connector is not None:
                    self._news.append(output.connector)

    def _sample(self, flight: Flight) -> None:
        flight.sampled = self._executor.sample_tokens(self._make_bitmask(flight.step))

    def _result(self, future: Future[T]) -> T:
        """Wait for a future, looking after the workers meanwhile."""
        while True:
            try:
                return future.result(HEALTH_INTERVAL_S)
            except FutureTimeoutError:
                if future.done():
                    raise
                self._executor.check_health()

    def _settle(self, future: Future[Any]) -> Any:
        """Wait for a future whose outcome is to be dropped."""
        try:
            return self._result(future)
        except Exception:  # noqa: BLE001 - only a dead executor matters here
            self._executor.check_health()
            return None

    def _with_news(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add what the connector reported in steps that were dropped."""
        if not self._news:
            return output
        reports, self._news = [*self._news, *filter(None, [output.connector])], []
        names = ConnectorOutput.__struct_fields__
        merged = ConnectorOutput(**{name: tuple(x for r in reports for x in getattr(r, name)) for name in names})
        return msgspec.structs.replace(output, connector=merged)


def _waits(flight: Flight) -> bool:
    """Whether the step's sampling is still to be asked for."""
    return flight.sampled is None and bool(flight.step.grammar and flight.step.num_scheduled_tokens)
