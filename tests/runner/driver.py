"""A scheduler for tests: makes steps for a few requests and knows nothing of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.sampling_params import SamplingParams
from headrace.messages.scheduler_output import CachedRequests, KVActions, NewRequest, SchedulerOutput

Run = Callable[[SchedulerOutput], ModelRunnerOutput]


class Job:
    """One request as the driver sees it."""

    def __init__(self, request_id: str, prompt: list[int], **params: Any) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.blocks: list[list[int]] = []
        self.params = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 60, **params})
        self.fault: dict[str, Any] | None = None
        self.running = False


class Driver:
    """Makes steps for jobs and applies what comes back."""

    def __init__(self, run: Run, groups: int = 1, num_blocks: int = 200, block_size: int = 4) -> None:
        self.run = run
        self.free = list(range(1, num_blocks))
        self.step_id = 0
        self.groups = groups
        self.block_size = block_size
        self.ended: list[str] = []
        self.lost: list[str] = []

    def make_step(self, grants: dict[Job, int]) -> SchedulerOutput:
        new: list[NewRequest] = []
        ids: list[str] = []
        computed: list[int] = []
        blocks: dict[str, tuple[list[int], ...]] = {}
        for job, count in grants.items():
            fresh: list[list[int]] = [[] for _ in range(self.groups)]
            if not job.blocks:
                job.blocks = [[] for _ in range(self.groups)]
            for group in range(self.groups):
                while len(job.blocks[group]) * self.block_size < job.num_computed + count:
                    block = self.free.pop(0)
                    job.blocks[group].append(block)
                    fresh[group].append(block)
            if not job.running:
                job.running = True
                new.append(
                    NewRequest(
                        request_id=job.request_id,
                        token_ids=list(job.tokens),
                        num_prompt_tokens=job.num_prompt,
                        num_computed_tokens=job.num_computed,
                        block_ids=tuple(list(b) for b in job.blocks),
                        sampling=job.params,
                        fault=job.fault,
                    )
                )
            else:
                ids.append(job.request_id)
                computed.append(job.num_computed)
                if any(fresh):
                    blocks[job.request_id] = tuple(fresh)
        for job, count in grants.items():
            job.num_computed += count
        self.step_id += 1
        finished, self.ended = self.ended, []
        preempted, self.lost = self.lost, []
        return SchedulerOutput(
            step_id=self.step_id,
            new=new,
            cached=CachedRequests(request_ids=ids, num_computed_tokens=computed, new_block_ids=blocks),
            num_scheduled_tokens={job.request_id: count for job, count in grants.items()},
            total_num_scheduled_tokens=sum(grants.values()),
            finished=finished,
            preempted=preempted,
            kv=KVActions(zero=[], copy=[]),
            spec={},
            grammar=[],
            encoder={},
        )

    def release(self, job: Job) -> None:
        for ids in job.blocks:
            self.free.extend(ids)
        job.blocks, job.running, job.num_computed = [], False, 0

    def preempt(self, job: Job) -> None:
        self.release(job)
        self.lost.append(job.request_id)

    def finish(self, job: Job) -> None:
        self.release(job)
        self.ended.append(job.request_id)

    def advance(self, grants: dict[Job, int]) -> ModelRunnerOutput:
        output = self.run(self.make_step(grants))
        sampled = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
        for job in grants:
            job.tokens.extend(sampled[job.request_id])
        return output
