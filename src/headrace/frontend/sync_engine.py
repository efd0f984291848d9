"""The synchronous twin of ``AsyncLLM``: a list of prompts in, their final outputs out, in the caller's thread.

Uses the same input and output processing; only the way in differs: nobody waits beside the caller, so the core is
stepped here until all of the list has ended. Whatever ends a call early (an invalid prompt, Ctrl-C, a dead core)
leaves nothing of it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import EngineDeadError
from headrace.config.sections import EngineConfig
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.fan_out import RequestGroup
from headrace.frontend.input_processor import InputProcessor, Prompt, PromptTokens, spread_params
from headrace.frontend.observer import NullObserver, RequestObserver
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.structured import StructuredOutputChecker
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import RequestLimits
from headrace.messages.outputs import CoreReady, EngineCoreOutputs, FinishReason
from headrace.messages.request_output import RequestOutput
from headrace.messages.requests import AnyControl, EngineCoreRequest
from headrace.messages.sampling_params import RequestOutputKind, SamplingParams


class SteppedCore(Protocol):
    """A core that runs when it is told to (``core.inproc_client.InlineCore``)."""

    @property
    def ready(self) -> CoreReady: ...
    @property
    def has_work(self) -> bool: ...
    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def step(self) -> EngineCoreOutputs: ...
    def control(self, request: AnyControl) -> Any: ...
    def shutdown(self) -> None: ...


class SyncEngine:
    """Runs lists of prompts to their end.

    Args:
        core: stepped here; `shutdown` shuts it down too.
        config: the resolved configuration.
        tokenizer: ``None`` serves token ids only.
        chat_template: ``None`` refuses chats.
        defaults: the model's sampling defaults by field name.
        observer: told of every request's life.
    """

    def __init__(
        self,
        core: SteppedCore,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        chat_template: ChatTemplate | None = None,
        defaults: Mapping[str, Any] | None = None,
        observer: RequestObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._core = core
        self._clock = clock or SystemClock()
        self._processor = OutputProcessor(observer or NullObserver())
        self._chat_template = chat_template
        self.tokenizer = tokenizer
        self.input = InputProcessor(
            tokenizer,
            RequestLimits.from_ready(core.ready, config),
            seed=config.model.seed,
            id_suffix="",
            eos_token_ids=config.architecture.eos_token_ids,
            defaults=defaults,
        )
        self._structured = StructuredOutputChecker(
            tokenizer, self.input.eos_token_ids, core.ready.vocab_size, self._clock, config.limits
        )
        self._num_seen = 0

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> PromptTokens:
        """Return the prompt of a conversation; the options are those of `ChatTemplate.render`."""
        return self.input.tokenize_chat(self._chat_template, messages, **options)

    def run(
        self,
        prompts: Sequence[Prompt | PromptTokens],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_finished: Callable[[RequestOutput], None],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Return the final outputs in the order of ``prompts``; ``on_finished`` hears of each as it ends.

        Raises:
            InvalidRequestError: one of the prompts cannot be done; then none has been started.
            EngineDeadError: the core is gone.
        """
        groups = [
            self._make_group(prompt, params, priority, cache_salt)
            for prompt, params in zip(prompts, spread_params(sampling_params, len(prompts)), strict=True)
        ]
        outputs: dict[RequestGroup, RequestOutput] = {}

        def keep(group: RequestGroup) -> None:
            output = group.take()
            assert output is not None
            outputs[group] = output
            on_finished(output)

        try:
            for group in groups:
                group.on_news = lambda group=group: keep(group)  # type: ignore[misc]
                self._processor.add(group)
                for child in group.children:
                    self._core.add_request(child)
            while self._processor.num_requests:
                self._step()
        except BaseException:
            self._clear(groups)
            raise
        return [outputs[group] for group in groups]

    def _make_group(
        self, prompt: Prompt | PromptTokens, params: SamplingParams | None, priority: int, cache_salt: str | None
    ) -> RequestGroup:
        tokens = prompt if isinstance(prompt, PromptTokens) else self.input.tokenize(prompt)
        params = self.input.default_sampling_params() if params is None else params
        if isinstance(params, SamplingParams):
            params = self._structured.check_now(params)
            params = msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        external_id = str(self._num_seen)
        self._num_seen += 1
        request = self.input.make_request(
            tokens,
            params,
            external_id=external_id,
            arrival=self._clock.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )
        return RequestGroup(external_id, request, tokens.text, self.tokenizer)

    def _step(self) -> None:
        if not self._core.has_work:
            raise EngineDeadError(
                "the engine has nothing to do although requests have not ended; this is a fault in it"
            )
        message = self._core.step()
        aborts = self._processor.process(message.outputs, self._clock.monotonic())
        if aborts:
            self._core.abort(aborts)

    def _clear(self, groups: Sequence[RequestGroup]) -> None:
        """End what is left of a call, in the core too."""
        now = self._clock.monotonic()
        for group in groups:
            group.on_news = None
            self._core.abort(self._processor.end(group, FinishReason.ABORT, now))
        try:
            while self._core.has_work:
                self._core.step()
        except EngineDeadError:
            return

    def control(self, request: AnyControl) -> Any:
        """Apply a control verb and return its value."""
        return self._core.control(request)

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
        self._core.shutdown()
