"""An `EngineCoreClient` without an engine: it plays the tokens of a script, one per request and step.

For tests of everything above the core. It keeps the core's promises (one end per request, unknown aborts ignored, no
output after an abort) and records what was asked of it. Steps happen when `step` is called or, with ``auto``, whenever
the consumer waits for output.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace.base.errors import EngineDeadError
from headrace.core.client import EngineCoreClient
from headrace.messages.outputs import (
    CoreReady,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestTimes,
    SchedulerStats,
)
from headrace.messages.requests import AnyControl, Drain, EngineCoreRequest
from headrace.messages.runner_output import PromptLogprobs
from headrace.testing.tokens import fake_logprobs

Script = Callable[[EngineCoreRequest], Sequence[int]]


class _Playing:
    """One request's place in its script."""

    def __init__(self, request: EngineCoreRequest, tokens: Sequence[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.num_output = 0


class FakeCoreClient(EngineCoreClient):
    """Plays scripts.

    Args:
        script: gives a request's tokens; one that runs out ends with its last token's finish reason, ``stop``.
        ready: what `start` reports.
        auto: step whenever the consumer waits and something runs.
        tokens_per_step: tokens that each request gets in one step.

    ``added``, ``aborted`` and ``controls`` record the calls. While ``gate`` is cleared `add_request` waits;
    ``refuse`` makes it raise for the given prompt lengths.
    """

    def __init__(
        self,
        script: Script,
        ready: CoreReady,
        *,
        auto: bool = False,
        tokens_per_step: int = 1,
    ) -> None:
        self._script = script
        self._ready = ready
        self._auto = auto
        self._tokens_per_step = tokens_per_step
        self._playing: dict[str, _Playing] = {}
        self._outbox: deque[EngineCoreOutputs] = deque()
        self._news = asyncio.Event()
        self._dead: str | None = None
        self._word = 0
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[list[str]] = []
        self.controls: list[AnyControl] = []
        self.refuse: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.stuck = False

    async def start(self) -> CoreReady:
        return self._ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        await self.gate.wait()
        if len(request.prompt_token_ids) in self.refuse:
            raise RuntimeError("refused by the test")
        self.added.append(request)
        self._playing[request.request_id] = _Playing(request, self._script(request))
        self._news.set()

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.append(list(request_ids))
        for request_id in request_ids:
            self._playing.pop(request_id, None)

    async def control(self, request: AnyControl, timeout_s: float = 60.0) -> Any:
        self._check_alive()
        self.controls.append(request)
        if isinstance(request, Drain):
            async with asyncio.timeout(timeout_s):
                while self._playing:
                    await asyncio.sleep(0)
        return None

    async def get_output(self) -> EngineCoreOutputs:
        while not self._outbox:
            self._check_alive()
            if self._auto and self._playing:
                self.step()
                break
            self._news.clear()
            await self._news.wait()
        return self._outbox.popleft()

    @property
    def dead_reason(self) -> str | None:
        return self._dead

    def progress(self) -> int:
        return self._word

    async def shutdown(self, drain_s: float = 0.0) -> None:
        self._playing.clear()
        self._dead = self._dead or "the engine was shut down"

    # For tests.

    @property
    def num_running(self) -> int:
        """Requests that still play."""
        return len(self._playing)

    def step(self, count: int = 1) -> None:
        """Play the next tokens of every request and send them."""
        for _ in range(count):
            self._word += not self.stuck
            outputs = [self._advance(playing) for playing in list(self._playing.values())]
            stats = SchedulerStats(num_running=len(self._playing))
            self.send(EngineCoreOutputs(outputs=outputs, stats=stats))

    def send(self, message: EngineCoreOutputs) -> None:
        """Send any message."""
        self._outbox.append(message)
        self._news.set()

    def die(self, reason: str) -> None:
        """Be gone."""
        self._dead = reason
        self._news.set()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _advance(self, playing: _Playing) -> EngineCoreOutput:
        request, sampling = playing.request, playing.request.sampling
        assert sampling.max_tokens is not None
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[])
        if playing.num_output == 0:
            output.times = _times(request)
        if playing.num_output == 0 and sampling.prompt_logprobs is not None:
            ids = request.prompt_token_ids[1:]
            entries = [fake_logprobs(token_id, sampling.prompt_logprobs) for token_id in ids]
            output.prompt_logprobs = PromptLogprobs(1, entries)
        for _ in range(self._tokens_per_step):
            token_id = playing.tokens[playing.num_output]
            playing.num_output += 1
            output.new_token_ids.append(token_id)
            if playing.num_output >= sampling.min_tokens and token_id in sampling.stop_token_ids:
                output.finish_reason, output.stop_reason = FinishReason.STOP, token_id
            elif token_id in request.eos_token_ids or playing.num_output == len(playing.tokens):
                output.finish_reason = FinishReason.STOP
            elif playing.num_output == sampling.max_tokens:
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                output.times = _times(request)
                del self._playing[request.request_id]
                break
        if sampling.logprobs is not None:
            output.logprobs = [fake_logprobs(token_id, sampling.logprobs) for token_id in output.new_token_ids]
        return output


def _times(request: EngineCoreRequest) -> RequestTimes:
    """A core that takes no time."""
    now = request.arrival_time
    return RequestTimes(arrival=now, queued=now, first_scheduled=now, first_token=now, last_token=now)
