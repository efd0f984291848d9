"""The asynchronous engine: requests in, streams out, over whatever `EngineCoreClient` it is given.

Owns the client streams and two tasks: one that takes the core's messages and one that watches its progress. Invariants:

- A stream is registered before its request is sent, so no output can be missed.
- However a consumer leaves (the end, an error, cancellation, a dropped generator), its request is ended here once and,
  if the core may still run it, aborted there once.
- Requests of one call are admitted all or not at all.
- When the core is gone every stream raises `EngineDeadError` with the cause, and so does every later call.
- While the core does not move nothing is admitted; requests without a token then end after a while, so that they can go
  elsewhere, and those that have begun wait for it to go on.

Nothing is awaited between the last check and the registration, which stands inside the ``try`` that undoes it.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

import msgspec

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import EngineDeadError, InvalidRequestError, NotAcceptingError, QueueFullError
from headrace.base.logging import get_logger
from headrace.config.sections import EngineConfig
from headrace.core.client import EngineCoreClient
from headrace.frontend.admission import Admission, QueueState
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.fan_out import RequestGroup
from headrace.frontend.health import GIVE_UP_AFTER_S, HUNG_AFTER_S, ProgressWatch, check_moves
from headrace.frontend.input_processor import (
    InputProcessor,
    Prompt,
    PromptTokens,
    RequestOptions,
    merge_eos,
    spread_params,
)
from headrace.frontend.observer import NullObserver, RequestObserver
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.stream import OutputStream
from headrace.frontend.structured import StructuredOutputChecker
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import RequestLimits
from headrace.messages.outputs import CoreReady, EngineCoreOutputs, FinishReason, SchedulerStats
from headrace.messages.request_output import RequestOutput
from headrace.messages.requests import AnyControl, Drain, EngineCoreRequest, Query, Sleep, Wake
from headrace.messages.sampling_params import SamplingParams
from headrace.observability.explain import explain_request
from headrace.observability.marks import CURRENT, MAX_PROMPT_CHARS, MarkBook, Marks

logger = get_logger(__name__)
T = TypeVar("T")

INLINE_CHARS = 2048
"""Texts up to this length are tokenised on the event loop: a hop to a thread would take longer."""

EXPLAIN_TIMEOUT_S = 10.0
_WATCH_INTERVAL_S = 0.5
_POLL_S = 0.02


class AsyncLLM:
    """Serves many requests at once.

    Args:
        client: handle on the core; `shutdown` shuts it down too.
        config: the resolved configuration.
        tokenizer: ``None`` serves token ids only.
        chat_template: ``None`` refuses chats.
        defaults: the model's sampling defaults by field name.
        observer: told of every request's life.
    """

    def __init__(
        self,
        client: EngineCoreClient,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        chat_template: ChatTemplate | None = None,
        defaults: Mapping[str, Any] | None = None,
        observer: RequestObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.client = client
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.stats = SchedulerStats()
        self._defaults = defaults
        self._observer = observer or NullObserver()
        self._clock = clock or SystemClock()
        self.marks = MarkBook()
        self._processor = OutputProcessor(self._observer)
        self._admission = Admission(config.scheduler)
        self._streams: dict[RequestGroup, OutputStream] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="edge")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch = ProgressWatch(self._clock.monotonic())
        self._input: InputProcessor | None = None
        vocab_size = config.architecture.vocab_size
        eos_token_ids = merge_eos(tokenizer, config.architecture.eos_token_ids, vocab_size)
        self._structured = StructuredOutputChecker(tokenizer, eos_token_ids, vocab_size, self._clock, config.limits)
        self._ready: CoreReady | None = None
        self._dead: EngineDeadError | None = None
        self._accepting = False
        self._asleep = False
        self._num_unnamed = 0

    # Life.

    async def start(self) -> CoreReady:
        """Wait for the core and begin to take its output; raises the core's start-up error."""
        assert self._ready is None, "start is called once"
        ready = await self.client.start()
        self._input = InputProcessor(
            self.tokenizer,
            RequestLimits.from_ready(ready, self.config),
            seed=self.config.model.seed,
            id_suffix=secrets.token_hex(4),
            eos_token_ids=self.config.architecture.eos_token_ids,
            defaults=self._defaults,
        )
        self._ready = ready
        self._accepting = True
        self._spawn(self._take_outputs())
        self._spawn(self._watch_progress())
        return ready

    async def prepare_grammars(self) -> None:
        """Have a thread do now what the first structured output would wait for, and all others with it.

        Best while the core loads: part of it lets no other thread run.
        """
        await self._structured.prepare()

    @property
    def ready(self) -> CoreReady:
        """What the core reported when it could serve."""
        if self._ready is None:
            raise NotAcceptingError("the engine is not ready")
        return self._ready

    @property
    def input(self) -> InputProcessor:
        """The input processor, with the limits in force."""
        if self._input is None:
            raise NotAcceptingError("the engine is not ready")
        return self._input

    @property
    def accepting(self) -> bool:
        """Whether requests are admitted: loaded, not draining, not dead."""
        return self._accepting and self._dead is None

    @property
    def num_requests(self) -> int:
        """Answers that have not ended."""
        return self._processor.num_requests

    @property
    def progress_age_s(self) -> float:
        """Seconds for which there was work and the core did not move."""
        now = self._clock.monotonic()
        self._watch.observe(self.client.progress(), self.num_requests > 0, now)
        return self._watch.age_s(now)

    def check_health(self) -> None:
        """Raise `EngineDeadError` when the core is gone, or has work and has not moved for a while."""
        self._check_alive()
        check_moves(self.progress_age_s)

    def now(self) -> float:
        """The time of this engine's clock, in which all marks are made."""
        return self._clock.monotonic()

    async def drain(self, timeout_s: float) -> bool:
        """Admit nothing more and wait for what runs; returns whether all of it ended in time."""
        self._accepting = False
        if not self.num_requests:
            return True
        try:
            await self.control(Drain(), timeout_s)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Stop the core (after running requests, for at most ``drain_s``) and end every stream. Idempotent."""
        if drain_s > 0 and self.accepting:
            await self.drain(drain_s)
        self._accepting = False
        for group in self._processor.groups():
            self._end(group, FinishReason.ABORT)
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def asleep(self) -> bool:
        """Whether the engine was sent to sleep from here."""
        return self._asleep

    async def sleep(self, level: int = 1, mode: str = "abort", timeout_s: float = 60.0) -> None:
        """Give memory back and admit nothing until `wake`.

        Args:
            level: 1 drops KV blocks, 2 the weights too.
            mode: what becomes of requests that live: ``abort`` ends them, ``wait`` lets them finish first, and under
                ``keep`` they go on after `wake`.
            timeout_s: for each of waiting and falling asleep.

        Raises:
            TimeoutError: it is awake as before.
        """
        before, self._asleep = self._asleep, True
        try:
            if mode == "abort":
                for group in self._processor.groups():
                    self._end(group, FinishReason.ABORT)
            elif mode == "wait":
                async with asyncio.timeout(timeout_s):
                    while self.num_requests:
                        await asyncio.sleep(_POLL_S)
            await self.control(Sleep(level=level), timeout_s)
        except BaseException:
            self._asleep = before
            raise

    async def wake(self, tags: Sequence[str] = (), timeout_s: float = 600.0) -> bool:
        """Take memory again: ``weights`` and ``kv_cache``, or all; returns whether the engine serves again."""
        self._asleep = await self.control(Wake(tags=tuple(tags)), timeout_s) == "sleeping"
        return not self._asleep

    # Requests.

    async def generate(
        self,
        prompt: Prompt | PromptTokens,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request; see `add_requests` for the options and errors.

        Leaving the generator early aborts the request.
        """
        stream = await self.add_request(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def add_request(
        self,
        prompt: Prompt | PromptTokens,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Send one request and return its stream, which the caller must consume or close."""
        return (await self.add_requests([prompt], sampling_params, request_id, **options))[0]

    async def add_requests(
        self,
        prompts: Sequence[Prompt | PromptTokens],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[OutputStream]:
        """Send requests, all or none, and return their streams in order; the caller must consume or close each.

        Args:
            prompts: text, token ids, their dict forms, or what `tokenize` returned.
            sampling_params: for all, or one per prompt; the model's defaults if ``None``.
            request_id: shown in outputs; need not be unique. Made up if ``None``.
            options: see `RequestOptions`.

        Raises:
            InvalidRequestError: one of the requests cannot be done.
            QueueFullError: the queue is at a limit of the operator.
            NotAcceptingError: draining or stopped.
            EngineDeadError: the core is gone.
        """
        arrival = self._clock.monotonic()
        if not prompts:
            raise InvalidRequestError("prompt must not be an empty list", param="prompt")
        if isinstance(sampling_params, SamplingParams):
            sampling_params = await self.check_constraint(sampling_params)
        elif sampling_params is not None:
            sampling_params = [await self.check_constraint(params) for params in sampling_params]
        params = spread_params(sampling_params, len(prompts))
        if request_id is None:
            self._num_unnamed += 1
            request_id = f"request-{self._num_unnamed}"
        self._check_open(len(prompts), 0)
        extras: dict[str, Any] = dict(options)
        special = extras.pop("add_special_tokens", True)
        marks, began = self.marks.open(arrival), self._clock.monotonic()
        tokens = await self.tokenize_all(prompts, special)
        if CURRENT.get() is None:
            # Below an edge the time is marked where it is spent.
            marks.tokenising.append((began, self._clock.monotonic()))
        requests = [
            self.input.make_request(prompt, own, external_id=request_id, arrival=arrival, **extras)
            for prompt, own in zip(tokens, params, strict=True)
        ]
        if marks.owner is not None:
            requests = [msgspec.structs.replace(request, owner=marks.owner) for request in requests]
        num_new = sum(request.sampling.n for request in requests)
        self._check_open(num_new, sum(request.sampling.n * len(request.prompt_token_ids) for request in requests))
        return await self._send(request_id, requests, [prompt.text for prompt in tokens], marks)

    async def _send(
        self, external_id: str, requests: Sequence[EngineCoreRequest], texts: Sequence[str | None], marks: Marks
    ) -> list[OutputStream]:
        """Register all, then send all; on any way out but the last all of them end."""
        streams: list[OutputStream] = []
        if self.config.observability.explain_prompts:
            self.marks.keep_prompts(marks, map(self._spell_prompt, requests, texts))
        try:
            groups = [
                RequestGroup(external_id, request, text, self.tokenizer)
                for request, text in zip(requests, texts, strict=True)
            ]
            streams += [self._register(group) for group in groups]
            ids = [child.request_id for group in groups for child in group.children]
            self.marks.bind(marks, external_id, ids, self._clock.monotonic())
            for group in groups:
                for answer, child in zip(group.answers, group.children, strict=True):
                    if answer.is_aborted:
                        continue
                    await self.client.add_request(child)
                    if answer.is_aborted:
                        # Its abort overtook it while it waited to be sent.
                        self._send_abort([child.request_id])
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def _spell_prompt(self, request: EngineCoreRequest, text: str | None) -> str:
        """The prompt as text, or as token ids where nobody can spell them."""
        if text is not None:
            return text
        token_ids = request.prompt_token_ids[:MAX_PROMPT_CHARS]
        return str(token_ids) if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _register(self, group: RequestGroup) -> OutputStream:
        """Make the group and its stream known, before anything is sent."""
        stream = OutputStream(group, functools.partial(self._leave, group), self.run_beside)
        group.on_news = stream.notify
        self._streams[group] = stream
        self._admission.note_busy(group.arrival)
        self._processor.add(group)
        return stream

    def _leave(self, group: RequestGroup) -> None:
        """A consumer is done with its stream; whatever still runs for it ends."""
        del self._streams[group]
        self._end(group, FinishReason.ABORT)

    def _end(self, group: RequestGroup, reason: FinishReason) -> None:
        """End what lives of a group here, and in the core."""
        now = self._clock.monotonic()
        ended = self._processor.end(group, reason, now)
        self.marks.ended(ended, now, now)
        self._send_abort(ended)

    def _send_abort(self, request_ids: list[str]) -> None:
        if request_ids and self._dead is None:
            self._spawn(self.client.abort(request_ids))

    async def abort(self, request_id: str | Sequence[str], *, owner: str | None = None) -> int:
        """End requests by the caller's ids and return how many; their streams get a last output that says ``abort``.

        Args:
            owner: only what this key sent.
        """
        wanted = {request_id} if isinstance(request_id, str) else set(request_id)
        groups = [
            group for group in self._processor.groups() if group.external_id in wanted and owner in (None, group.owner)
        ]
        for group in groups:
            self._end(group, FinishReason.ABORT)
        return len(groups)

    async def control(self, request: AnyControl, timeout_s: float = 60.0) -> Any:
        """Send a control verb and return its reply."""
        self._check_alive()
        return await self.client.control(request, timeout_s)

    async def explain(self, name: str, *, with_prompts: bool = False) -> dict[str, Any] | None:
        """Why a request takes or took its time, one explanation per answer; ``None`` for one that nobody remembers.

        Args:
            name: the caller's id or an internal one.
            with_prompts: add what it asked, as far as that is kept; who may see it is for the caller to decide.
        """
        marks = self.marks.find(name)
        if marks is None:
            return None
        answers = []
        for request_id in marks.ids if name not in marks.ids else [name]:
            core = await self.control(Query(topic="explain", argument=request_id), EXPLAIN_TIMEOUT_S)
            now = self._clock.monotonic()
            answers.append(explain_request(marks, request_id, core, self.marks.busy, self.marks.name_of, now))
        found = answers[0] if len(answers) == 1 else {**answers[0], "answers": answers}
        return {**found, "prompts": marks.prompts} if with_prompts else found

    async def check_constraint(self, params: SamplingParams, param: str = "structured_outputs") -> SamplingParams:
        """Return the parameters with a structured output that is known to be enforceable; ``param`` is for errors."""
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return params
        return await self._structured.check(params, param)

    # Text, beside the loop when it is long.

    async def tokenize(self, prompt: Prompt | PromptTokens, add_special_tokens: bool = True) -> PromptTokens:
        """Return the prompt's ids, checked against the limits."""
        if isinstance(prompt, PromptTokens):
            return prompt
        with self._mark_tokenising():
            if self.input.num_chars(prompt) <= INLINE_CHARS:
                return self.input.tokenize(prompt, add_special_tokens)
            return await self.run_beside(self.input.tokenize, prompt, add_special_tokens)

    async def tokenize_all(
        self, prompts: Sequence[Prompt | PromptTokens], add_special_tokens: bool = True
    ) -> list[PromptTokens]:
        """`tokenize` for several prompts; many short ones leave the event loop free too."""
        if len(prompts) == 1 or sum(map(self._num_items, prompts)) <= INLINE_CHARS:
            return [await self.tokenize(prompt, add_special_tokens) for prompt in prompts]

        def work() -> list[PromptTokens]:
            return [
                prompt if isinstance(prompt, PromptTokens) else self.input.tokenize(prompt, add_special_tokens)
                for prompt in prompts
            ]

        with self._mark_tokenising():
            return await self.run_beside(work)

    def _num_items(self, prompt: Prompt | PromptTokens) -> int:
        """How much there is to tokenise or to check: characters or ids."""
        if isinstance(prompt, PromptTokens):
            return 0
        return self.input.num_chars(prompt) or len(prompt)

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> PromptTokens:
        """Return the prompt of a conversation; the options are those of `ChatTemplate.render`."""
        with self._mark_tokenising():
            work = functools.partial(self.input.tokenize_chat, self.chat_template, messages, **options)
            return await self.run_beside(work)

    @contextmanager
    def _mark_tokenising(self) -> Iterator[None]:
        """Note how long the block took, for explanations."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self.marks.tokenised(began, self._clock.monotonic())

    async def run_beside(self, work: Callable[..., T], *args: Any) -> T:
        """Run costly edge work on a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # Tasks.

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the frontend failed", exc_info=task.exception())

    async def _take_outputs(self) -> None:
        try:
            while True:
                self._handle(await self.client.get_output())
                # A core that always has something must not keep consumers from running.
                await asyncio.sleep(0)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("taking the core's output failed")
            self._die(EngineDeadError(f"taking the engine's output failed: {type(error).__name__}: {error}"))

    def _handle(self, message: EngineCoreOutputs) -> None:
        if message.dead is not None:
            raise EngineDeadError(message.dead)
        now = self._clock.monotonic()
        before = self._processor.num_finished
        aborts = self._processor.process(message.outputs, now)
        self._send_abort(aborts)
        done = self._clock.monotonic()
        self.marks.worked(now, done)
        if self._processor.num_finished > before:
            ended = [output.request_id for output in message.outputs if output.finish_reason is not None]
            self.marks.ended(ended + aborts, now, done)
        num_ended = self._processor.num_finished - before
        self._admission.note_finished(num_ended, now, idle=not self._processor.num_requests)
        if message.stats is not None:
            self.stats = message.stats
            self._observer.stats_arrived(message.stats)

    def _die(self, error: EngineDeadError) -> None:
        """The core is gone: end every stream with the cause."""
        self._dead = error
        self._accepting = False
        now = self._clock.monotonic()
        for group, stream in list(self._streams.items()):
            stream.fail(error)
            self.marks.ended(self._processor.end(group, FinishReason.ERROR, now, str(error)), now, now)

    async def _watch_progress(self) -> None:
        """Read the word now and then, so that its age is known whenever somebody asks."""
        while self._dead is None:
            before = self._clock.monotonic()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = self._clock.monotonic()
            if now - before > 4 * _WATCH_INTERVAL_S:
                # This process stood still itself, so it cannot say whether the core did.
                self._watch.restart(now)
            if self.progress_age_s > GIVE_UP_AFTER_S:
                self._give_up_unstarted()

    def _give_up_unstarted(self) -> None:
        """The core does not move: end what has no token yet."""
        now = self._clock.monotonic()
        for group in self._processor.groups():
            if not any(answer.first_token_time for answer in group.answers):
                self._streams[group].fail(_not_moving(self.progress_age_s))
                ended = self._processor.end(group, FinishReason.ABORT, now)
                self.marks.ended(ended, now, now)
                self._send_abort(ended)

    def _check_alive(self) -> None:
        reason = self.client.dead_reason
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if reason is not None:
            raise EngineDeadError(reason)

    def _check_open(self, num_new: int, num_new_tokens: int) -> None:
        """Raise unless so many requests may be admitted now."""
        self._check_alive()
        if not self._accepting:
            raise NotAcceptingError("the engine is draining or not ready and admits no requests")
        if self._asleep:
            raise NotAcceptingError("the engine sleeps; its operator can wake it up")
        if self.progress_age_s > HUNG_AFTER_S:
            raise _not_moving(self.progress_age_s)
        processor = self._processor
        state = QueueState(
            processor.num_requests, processor.num_unstarted, processor.num_unstarted_tokens, self.stats.num_waiting
        )
        try:
            self._admission.check(state, num_new, num_new_tokens)
        except QueueFullError as error:
            self._observer.request_rejected(error.limit)
            raise


def _not_moving(age_s: float) -> NotAcceptingError:
    message = f"the engine has work but has not moved for {age_s:.0f} s; nothing was done for this request, try again"
    return NotAcceptingError(message)
