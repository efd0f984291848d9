"""A whole core in virtual time with its flight recorder; for tests."""

from __future__ import annotations

from typing import Any

from headrace.base.clock import ManualClock
from headrace.core.engine_core import EngineCore
from headrace.core.watching import make_watching
from headrace.messages.outputs import EngineCoreOutput
from headrace.messages.requests import EngineCoreRequest, Query
from headrace.testing.engine_config import make_engine_config
from headrace.testing.faults import FaultPlan
from headrace.testing.simulated_executor import SimulatedExecutor, StepCost

STEP_S = 0.010


class WatchedCore:
    """An engine core whose steps take ``STEP_S``; ``outputs`` has what its client was told."""

    def __init__(
        self,
        *,
        faults: FaultPlan | None = None,
        grammar: Any = None,
        connector: Any = None,
        worker_connector: Any = None,
        **settings: Any,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.config = make_engine_config(**settings)
        executor = SimulatedExecutor(
            self.config,
            clock=self.clock,
            cost=StepCost(STEP_S, 0.0),
            faults=faults or FaultPlan(),
            connector=worker_connector,
        )
        self.watching = make_watching(self.config, self.clock)
        self.recorder = self.watching.recorder
        self.core = EngineCore(
            self.config,
            executor,
            self.clock,
            grammar=grammar,
            connector=connector,
            **self.watching.parts(),
        )
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.core.add_request(request)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for message in self.core.step().values():
                for output in message.outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
            if self.core.stalled:
                self.clock.advance(0.002)
            self.recorder.check_invariants()

    def run(self, *requests: EngineCoreRequest) -> None:
        """Add and go on until nothing is left to do."""
        self.add(*requests)
        for _ in range(10_000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("no end")

    def explain(self, request_id: str) -> dict[str, Any]:
        view: dict[str, Any] = self.core.perform(Query(topic="explain", argument=request_id))
        return view

    def causes(self, request_id: str) -> dict[str, float]:
        """Seconds by cause."""
        sums: dict[str, float] = {}
        for span in self.explain(request_id)["spans"]:
            sums[span["cause"]] = sums.get(span["cause"], 0.0) + span["end"] - span["start"]
        return sums

    def unattributed(self, request_id: str) -> float:
        """Share of the time in the core that no span covers."""
        view = self.explain(request_id)
        end = view["finished"] or view["now"]
        covered = sum(span["end"] - span["start"] for span in view["spans"])
        return 1.0 - covered / (end - view["queued"]) if end > view["queued"] else 0.0
