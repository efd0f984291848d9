"""Runs a scheduler against the fake runner with several steps in flight, as the core does."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from headrace.config.sections import SchedulerSection
from headrace.control.scheduler.scheduler import Scheduler
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput
from tests.control.fake_runner import FakeRunner, make_kv


def make_section(**changes: Any) -> SchedulerSection:
    values: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "watermark": 0.0}
    return SchedulerSection(**(values | changes))


class Driver:
    """``schedule`` up to the depth, then commit the oldest step; invariants are checked after every call."""

    def __init__(
        self,
        kv: KVCacheConfig | None = None,
        *,
        depth: int = 1,
        max_model_len: int = 64,
        caching: bool = True,
        **more: Any,
    ) -> None:
        parts = {
            key: more.pop(key)
            for key in ("connector", "grammar", "recorder", "events", "num_draft_tokens")
            if key in more
        }
        self.kv_config = kv or make_kv(65)
        self.max_model_len = max_model_len
        self.section = make_section(**more)
        self.scheduler = Scheduler(
            self.section,
            self.kv_config,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
            **parts,
        )
        self.runner = FakeRunner(self.kv_config)
        self.depth = depth
        self.now = 0.0
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}
        self.steps: list[SchedulerOutput] = []
        self.drafter: Any = None

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request, self.now)
            self.tokens[request.request_id] = []
            self.outputs[request.request_id] = []
            self.scheduler.check_invariants()

    def take(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for message in outputs.values():
            self.take_list(message.outputs)

    def take_list(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, f"{output.request_id} went on after its end"
            self.tokens[output.request_id] += output.new_token_ids
            self.outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output

    def schedule(self, **more: Any) -> SchedulerOutput | None:
        step = self.scheduler.schedule(self.now, **more)
        self.scheduler.check_invariants()
        self.take(self.scheduler.take_outputs())
        assert step.total_num_scheduled_tokens <= self.section.max_num_batched_tokens
        if not step.num_scheduled_tokens and step.connector is None:
            return None
        self.steps.append(step)
        return step

    def launch(self, **more: Any) -> bool:
        step = self.schedule(**more)
        if step is None:
            return False
        output = self.runner.execute(step)
        if self.drafter is not None:
            drafts = {i: self.drafter(self.runner.rows[i].tokens) for i in output.request_ids}
            output = msgspec.structs.replace(output, drafts=drafts)
        self.in_flight.append((step, output))
        return True

    def commit(self) -> None:
        step, output = self.in_flight.popleft()
        self.now += 0.01
        self.take(self.scheduler.update_from_output(step, output, self.now))
        self.scheduler.check_invariants()

    def turn(self) -> bool:
        """One turn of the loop; ``False`` when nothing could be done."""
        launched = False
        while len(self.in_flight) < self.depth and self.launch():
            launched = True
        if self.in_flight:
            self.commit()
            return True
        return launched

    def finish(self, ids: list[str] | None, reason: FinishReason = FinishReason.ABORT) -> None:
        for outputs in self.scheduler.finish_requests(ids, reason).values():
            self.take_list(outputs)
        self.scheduler.check_invariants()

    def run(self, max_turns: int = 5000) -> None:
        """Until every request has ended; a stall fails."""
        for _ in range(max_turns):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            assert self.turn(), f"stalled: {self.scheduler.make_stats()}"
        raise AssertionError("no end in sight")

    def assert_empty(self) -> None:
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_usable
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
