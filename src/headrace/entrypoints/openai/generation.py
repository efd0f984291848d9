"""What completions and chat share: sending prompts, merging their outputs, and counting.

All prompts of a body are admitted or none is. Leaving `run` in any way closes every stream, which aborts what has not
ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.errors import InvalidRequestError, RequestFailedError
from headrace.entrypoints.openai.protocol import DeliveryFields, Timing, Usage, make_usage
from headrace.frontend.fan_out import HEAVY_ENTRIES
from headrace.messages.outputs import RequestTimes
from headrace.messages.request_output import CompletionOutput, RequestOutput
from headrace.messages.runner_output import GRAMMAR_TOO_COSTLY, NO_TOKEN_LEFT
from headrace.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.entrypoints.openai.context import ServerContext
    from headrace.frontend.input_processor import PromptTokens
    from headrace.frontend.stream import OutputStream

Item = tuple[int, RequestOutput]


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent to the engine: prompts, each answered ``sampling.n`` times."""

    answer_id: str
    prompts: list[PromptTokens]
    sampling: SamplingParams
    body: DeliveryFields

    @property
    def is_heavy(self) -> bool:
        """Whether the answers hold so many logprobs that they are written down beside the event loop."""
        sampling = self.sampling
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_output = len(self.prompts) * sampling.n * (sampling.max_tokens or num_prompt)
        asked = [(sampling.prompt_logprobs, num_prompt), (sampling.logprobs, num_output)]
        return any(count is not None and (abs(count) + 1) * tokens > HEAVY_ENTRIES for count, tokens in asked)

    async def run(self, context: ServerContext) -> AsyncGenerator[Item, None]:
        """Yield ``(index of the prompt, output)`` as outputs arrive."""
        streams = await context.llm.add_requests(
            self.prompts,
            self.sampling,
            self.answer_id,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt,
        )
        try:
            if len(streams) == 1:
                async for output in streams[0]:
                    yield 0, output
            else:
                merged = _merge(streams)
                try:
                    async for item in merged:
                        yield item
                finally:
                    await merged.aclose()
        finally:
            for stream in streams:
                stream.close()


async def _merge(streams: list[OutputStream]) -> AsyncGenerator[Item, None]:
    """Outputs of several streams in order of arrival; the first error ends all."""
    # One place only, so that what arrives for a slow client is merged in the streams and not kept here.
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        for pump in pumps:
            with suppress(asyncio.CancelledError):
                await pump


async def _pump(index: int, stream: OutputStream, queue: asyncio.Queue[Item | BaseException | None]) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
    except Exception as error:  # noqa: BLE001 - handed to the one who waits, who raises it
        await queue.put(error)
        return
    await queue.put(None)


class UsageCounter:
    """Tokens of all prompts and answers of a request; each prompt counts once.

    Args:
        timed: tell where the time went, too.
    """

    def __init__(self, timed: bool = False) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0
        self._timed = timed
        self._slowest: RequestTimes | None = None

    def add(self, index: int, output: RequestOutput, num_new_tokens: int) -> None:
        """Count an output of the prompt with this index."""
        self._completion += num_new_tokens
        if index not in self._prompts or self._prompts[index][1] < output.num_cached_tokens:
            self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.times is not None and (self._slowest is None or output.times.last_token > self._slowest.last_token):
            self._slowest = output.times

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """The sums so far."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(hits for _, hits in self._prompts.values())
        usage = make_usage(prompt, self._completion, cached, reasoning_tokens)
        if self._timed and self._slowest is not None and self._slowest.first_token:
            usage.timing = make_timing(self._slowest)
        return usage


def make_timing(times: RequestTimes) -> Timing:
    """The core's milestones as stretches."""
    return Timing(
        queue_ms=1e3 * max(0.0, times.first_scheduled - times.arrival),
        prefill_ms=1e3 * max(0.0, times.first_token - times.first_scheduled),
        decode_ms=1e3 * max(0.0, times.last_token - times.first_token),
        num_preemptions=times.num_preemptions,
    )


def check_output(output: CompletionOutput) -> None:
    """Raise for an answer that ended with an error: the request's own fault, or the engine's."""
    if output.finish_reason == "error":
        if output.error == NO_TOKEN_LEFT:
            raise InvalidRequestError(NO_TOKEN_LEFT, code="no_token_left")
        if output.error is not None and GRAMMAR_TOO_COSTLY in output.error:
            raise InvalidRequestError(output.error, code="grammar_too_costly")
        raise RequestFailedError(output.error or "the request failed inside the engine")
