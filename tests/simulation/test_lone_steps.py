"""A small pool, no watermark, and many who wait: a step that runs one token alone has a reason.

The one that runs holds nearly all blocks, and neither the head of the queue nor the few that are tried behind it fit
beside it. Others further back might, but a long queue must not cost a long look.
"""

from __future__ import annotations

from concurrent.futures import Future
from random import Random

import pytest

from headrace.base.clock import ManualClock
from headrace.control.scheduler.passes import _MAX_TRIED_BEHIND_HEAD
from headrace.core.engine_core import EngineCore
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput
from headrace.testing.engine_config import make_architecture, make_engine_config
from headrace.testing.requests import make_request
from headrace.testing.simulated_executor import SimulatedExecutor

BLOCK = 8
MAX_LEN = 400
NUM_REQUESTS = 60
LONG_STREAK = 16


class _Watching(SimulatedExecutor):
    """Looks at the scheduler while it hands a step over, before any commit changes what it decided from."""

    core: EngineCore
    streak = longest = 0

    def execute_model(self, step: SchedulerOutput, non_block: bool = True) -> Future[ModelRunnerOutput | None]:
        state = self.core.scheduler._state
        alone = step.total_num_scheduled_tokens == 1 and len(state.waiting) > 0
        self.streak = self.streak + 1 if alone else 0
        self.longest = max(self.longest, self.streak)
        # Blocks come back, and a victim steps aside, for a step or two.
        if self.streak > 2:
            tried = state.waiting.requests[: 1 + _MAX_TRIED_BEHIND_HEAD]
            assert all(-(-request.num_tokens // BLOCK) > state.kv.pool.num_free for request in tried), step.step_id
        return super().execute_model(step, non_block)


@pytest.mark.slow
def test_one_token_alone_step_after_step_only_where_nobody_that_is_tried_fits() -> None:
    config = make_engine_config(
        make_architecture(vocab_size=50, max_position=MAX_LEN),
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        num_kv_blocks=56,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        watermark=0.0,
        enable_prefix_caching=False,
    )
    clock, random = ManualClock(), Random(6)
    executor = _Watching(config, clock=clock)
    core = executor.core = EngineCore(config, executor, clock)
    for number in range(NUM_REQUESTS):
        length = random.randint(4, 200)
        max_tokens = random.randint(4, min(200, MAX_LEN - length))
        core.add_request(make_request(f"r{number}", length, max_tokens, seed=number))
    while core.has_work:
        core.step()
        core.scheduler.check_invariants()
    assert executor.longest >= LONG_STREAK, "the case is to have a long one"
    assert core.scheduler.make_stats().num_preemptions > NUM_REQUESTS // 2
