"""Prompts and parameters to what the core takes.

Owns the forms a prompt may have, defaults of the model, the ids that end a text, the spellings of bad words, and the
seed and the internal id that every request gets. It is synchronous and safe to call from several threads; the callers
decide what runs beside the event loop. Every request passes `validation` here, whoever sends it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from headrace.base.errors import InvalidRequestError
from headrace.frontend import validation
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.seeds import derive_seed
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.tools import describe_tools
from headrace.frontend.validation import RequestLimits
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""

_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids"})


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt that has been tokenised and checked; ``text`` is ``None`` when it came as ids."""

    token_ids: list[int]
    text: str | None = None


class RequestOptions(TypedDict, total=False):
    """What may go with a request beside its parameters.

    ``priority``: lower runs earlier; needs the priority policy. ``cache_salt`` separates this caller's prefix cache
    from others'. ``add_special_tokens``: whether text gets the tokenizer's special tokens (default true).
    ``kv_transfer_params`` are for the KV connector. ``fault`` is a test hook, see `EngineCoreRequest`.
    """

    priority: int
    cache_salt: str | None
    add_special_tokens: bool
    kv_transfer_params: dict[str, Any] | None
    fault: dict[str, Any] | None


class InputProcessor:
    """Makes `EngineCoreRequest` records.

    Args:
        tokenizer: ``None`` serves token ids only.
        limits: of the model and the operator.
        seed: of the engine; requests without a seed get one derived from it and their number.
        id_suffix: makes internal ids unique among all frontends of a core.
        eos_token_ids: ids that end a text, beside the tokenizer's.
        defaults: the model's sampling defaults by field name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        *,
        seed: int,
        id_suffix: str,
        eos_token_ids: Sequence[int] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.defaults = dict(defaults or {})
        self.eos_token_ids = merge_eos(tokenizer, eos_token_ids, limits.vocab_size)
        self._seed = seed
        self._id_suffix = id_suffix
        self._numbers = itertools.count()

    def default_sampling_params(self) -> SamplingParams:
        """Return what a request that asks for nothing gets."""
        return SamplingParams(**self.defaults)

    def num_chars(self, prompt: Prompt) -> int:
        """Return the characters to tokenise, 0 for ids; raises for text that is certainly too long."""
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt") or ""
        if not isinstance(prompt, str) or self.tokenizer is None:
            return 0
        validation.check_prompt_chars(len(prompt), self.tokenizer.max_chars_per_token, self.limits)
        return len(prompt)

    def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> PromptTokens:
        """Return the prompt's ids, checked against the limits.

        Raises:
            InvalidRequestError: no known form, empty, too long, or ids outside the vocabulary.
        """
        form = _unwrap(prompt)
        if isinstance(form, str):
            if self.tokenizer is None:
                raise InvalidRequestError("this engine has no tokenizer; send token ids", param="prompt")
            self.num_chars(form)
            tokens = PromptTokens(self.tokenizer.encode(form, add_special_tokens), form)
        else:
            tokens = PromptTokens(list(form))
        validation.check_prompt(tokens.token_ids, self.limits)
        return tokens

    def tokenize_chat(
        self,
        template: ChatTemplate | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> PromptTokens:
        """Return the prompt of a conversation.

        Args:
            template: of the model.
            messages: the conversation.
            tools: that may be called; told of in the system turn where the template has no place for them.
            add_special_tokens: begin with BOS where the model wants one and the template wrote none.
            options: those of `ChatTemplate.render`.
        """
        if template is None or self.tokenizer is None:
            message = "the model has no chat template; start the server with --chat-template, or send a prompt"
            raise InvalidRequestError(message, param="messages", code="no_chat_template")
        validation.check_chat_size(messages, tools, self.limits)
        if tools and "tools" not in template.variables:
            template.check(messages)
            messages, tools = describe_tools(messages, tools), None
        text = template.render(messages, tools=tools, **options)
        self.num_chars(text)
        encode = self.tokenizer.encode_chat if add_special_tokens else self._encode_bare
        tokens = PromptTokens(encode(text), text)
        validation.check_prompt(tokens.token_ids, self.limits)
        return tokens

    def _encode_bare(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)

    def make_request(
        self,
        prompt: PromptTokens,
        params: SamplingParams | None,
        *,
        external_id: str,
        arrival: float,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        fault: dict[str, Any] | None = None,
    ) -> EngineCoreRequest:
        """Return the checked request with ``n`` answers (see `fan_out`), its seed and an internal id.

        Raises:
            InvalidRequestError: anything the validator refuses.
        """
        params = self.default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("sampling_params must be a SamplingParams", param="sampling_params")
        limits = self.limits
        num_prompt_tokens = len(prompt.token_ids)
        validation.check_request_id(external_id)
        validation.check_cache_salt(cache_salt)
        validation.check_priority(priority, limits)
        validation.check_kv_transfer_params(kv_transfer_params)
        validation.check_sampling(params, num_prompt_tokens, limits)
        eos = () if params.ignore_eos else self.eos_token_ids
        bad_words = self._spell(params.bad_words)
        validation.check_masks(params, eos, bad_words)
        number = next(self._numbers)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        sampling = validation.resolve_sampling(params, num_prompt_tokens, seed, limits)
        validation.check_fits(num_prompt_tokens, sampling.max_tokens or 0, limits)
        return EngineCoreRequest(
            request_id=f"{external_id}-{self._id_suffix}{number:x}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            eos_token_ids=eos,
            bad_words_token_ids=bad_words,
            arrival_time=arrival,
            priority=priority,
            cache_salt=cache_salt,
            kv_transfer_params=kv_transfer_params,
            fault=fault,
        )

    def _spell(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word at the start of a text and after a space, which are different tokens."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise InvalidRequestError("bad_words need a tokenizer", param="bad_words")
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.strip()
            for text in (bare, " " + bare):
                spellings[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        validation.check_bad_words(list(spellings), self.limits)
        return tuple(spellings)


def merge_eos(tokenizer: Tokenizer | None, more: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return every id that ends a text: the tokenizer's, and ``more`` of the model's."""
    own = tokenizer.eos_token_ids if tokenizer is not None else ()
    return tuple(token_id for token_id in dict.fromkeys([*own, *more]) if 0 <= token_id < vocab_size)


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """Return one entry per prompt from parameters for all or for each.

    Raises:
        InvalidRequestError: another number of them than of prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError("there must be one sampling_params per prompt", param="sampling_params")
    return params


def _unwrap(prompt: Prompt) -> str | Sequence[int]:
    """Return the text or the ids of a prompt in any of its forms."""
    form: Any = prompt
    if isinstance(prompt, Mapping):
        unknown = sorted(str(key)[:40] for key in set(prompt) - _PROMPT_KEYS)
        if unknown:
            raise InvalidRequestError(f"prompt: unknown keys {', '.join(unknown[:8])}", param="prompt")
        if len(prompt) != 1:
            message = "a prompt given as a dict needs either 'prompt' or 'prompt_token_ids'"
            raise InvalidRequestError(message, param="prompt")
        if "prompt" in prompt:
            form = prompt["prompt"]
            if not isinstance(form, str):
                raise InvalidRequestError("prompt must be text", param="prompt")
        else:
            form = prompt["prompt_token_ids"]
            if isinstance(form, str):
                raise InvalidRequestError("prompt_token_ids must be a list of integers", param="prompt_token_ids")
    if isinstance(form, str):
        return form
    if not isinstance(form, (list, tuple)):
        raise InvalidRequestError("a prompt must be text or a list of token ids", param="prompt")
    return form
