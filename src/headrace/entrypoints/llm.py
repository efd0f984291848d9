"""``LLM``: the engine inside the caller's program, for lists of prompts.

Builds everything from a model name and settings (those of ``config.sections``, by field name), runs the core in the
caller's thread and shows a progress bar. Importing this module loads no model code; making an `LLM` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from headrace.core.inproc_client import InlineCore
from headrace.core.make_client import EXECUTORS
from headrace.entrypoints.async_engine import make_chat_template, make_tokenizer, sampling_defaults
from headrace.entrypoints.engine_config import load_engine_config
from headrace.frontend.input_processor import Prompt, PromptTokens
from headrace.frontend.sync_engine import SyncEngine
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.tools import plan_tools
from headrace.messages.request_output import RequestOutput
from headrace.messages.requests import Profile, ResetPrefixCache
from headrace.messages.sampling_params import SamplingParams
from headrace.model_files.tokenizer import load_tokenizer

Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers lists of prompts.

    Args:
        model: alias, local folder, ``.gguf`` file or hub id.
        settings: any configuration field by name, for example ``dtype``, ``max_model_len``, ``max_num_seqs``,
            ``enable_prefix_caching``, ``kv_cache_memory`` (bytes) or ``seed``.

    Raises:
        ConfigError: a setting that is unknown or cannot work.
        ModelFileError: the model is missing, broken or not supported.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        # Nobody watches the gaps between an offline run's tokens: prompts need not make way for them.
        self.config = load_engine_config({"model": model, "max_token_gap_factor": 0.0, **settings})
        loaded = load_tokenizer(self.config.model.tokenizer or self.config.model_path)
        template = make_chat_template(self.config, loaded)
        core = InlineCore(self.config, EXECUTORS[self.config.parallel.executor])
        self._engine = SyncEngine(
            core,
            self.config,
            make_tokenizer(loaded),
            chat_template=template,
            defaults=sampling_defaults(self.config),
        )
        self._finalizer = weakref.finalize(self, self._engine.shutdown)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to ``prompts``, in their order.

        Args:
            prompts: one or several of: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``.
            sampling_params: for all, or one per prompt; the model's defaults if ``None``.
            use_tqdm: draw a progress bar.
            priority: lower runs earlier; needs the priority policy.
            cache_salt: separates the prefix cache of these prompts from others'.

        Raises:
            InvalidRequestError: (a ``ValueError``) one of the prompts cannot be done; then none is left behind.
            EngineDeadError: the engine is gone.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm, priority=priority, cache_salt=cache_salt)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation or several, in their order.

        Args:
            messages: dicts with ``role`` and ``content``, or a list of such conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            add_generation_prompt: end each prompt with the opening of an assistant's turn.
            continue_final_message: go on inside the last message instead.
            tools: functions as the OpenAI API has them, shown to the model.
            chat_template_kwargs: further variables that the template reads.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        shown = plan_tools(tools, None, None, self.config.limits).for_template()
        prompts = [
            self._engine.tokenize_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=shown,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt | PromptTokens],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        **options: Any,
    ) -> list[RequestOutput]:
        num_tokens = 0
        with tqdm(total=len(prompts), desc="Prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as bar:

            def on_finished(output: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                elapsed = bar.format_dict["elapsed"]
                if elapsed:
                    bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)
                bar.update()

            return self._engine.run(prompts, sampling_params, on_finished, **options)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        assert self._engine.tokenizer is not None
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` uses when no parameters are given."""
        return self._engine.input.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; returns whether that was done."""
        return bool(self._engine.control(ResetPrefixCache()))

    def start_profile(self) -> None:
        """Begin to profile the operators of every step."""
        self._engine.control(Profile(start=True))

    def stop_profile(self) -> str:
        """End the profile; returns the path of its trace."""
        return str(self._engine.control(Profile(start=False))["path"])

    def shutdown(self) -> None:
        """Release the model's memory. Idempotent; also done when the object or the program ends."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, a dict, a list of integers) or several, as several."""
    if isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
