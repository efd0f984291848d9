"""An `AsyncLLM` from a configuration: the one place that gives the frontend its tokenizer, template and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.sections import EngineConfig
from headrace.core.client import EngineCoreClient
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.chat import ChatTemplate
from headrace.frontend.observer import RequestObserver
from headrace.frontend.parsers.registry import get_reasoning_format, get_tool_format
from headrace.frontend.tokenizer import Tokenizer
from headrace.model_files.architecture import generation_defaults
from headrace.model_files.tokenizer import LoadedTokenizer, load_tokenizer


def make_async_llm(config: EngineConfig, client: EngineCoreClient, observer: RequestObserver | None = None) -> AsyncLLM:
    """Return the frontend, not yet started.

    Raises:
        ConfigError: the chat template cannot be read or does not compile, or a parser is not known.
        ModelFileError: the tokenizer is missing or broken.
    """
    loaded = load_tokenizer(config.model.tokenizer or config.model_path)
    template = make_chat_template(config, loaded)
    # Unknown names are to be found now, not when the model has been loaded.
    get_tool_format(config.model.tool_call_parser, template.source if template else "")
    get_reasoning_format(config.model.reasoning_parser, template.source if template else "")
    return AsyncLLM(
        client,
        config,
        make_tokenizer(loaded),
        chat_template=template,
        defaults=sampling_defaults(config),
        observer=observer,
    )


def make_tokenizer(loaded: LoadedTokenizer) -> Tokenizer:
    """The frontend's tokenizer from a loaded one."""
    return Tokenizer(
        loaded.tokenizer,
        bos_token_id=loaded.info.bos_token_id,
        add_bos=loaded.info.add_bos,
        eos_token_ids=loaded.info.eos_token_ids,
        chat_template=loaded.info.chat_template,
    )


def make_chat_template(config: EngineConfig, loaded: LoadedTokenizer) -> ChatTemplate | None:
    """The operator's template, else the model's own, else none."""
    source = loaded.info.chat_template
    if config.model.chat_template is not None:
        try:
            source = Path(config.model.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {config.model.chat_template}: {error}") from None
    if source is None:
        return None
    return ChatTemplate(source, _named_tokens(loaded), limit_s=config.limits.template_timeout_s)


def _named_tokens(loaded: LoadedTokenizer) -> Mapping[str, str]:
    """``bos_token`` and ``eos_token`` as templates write them."""
    eos = loaded.info.eos_token_ids[0] if loaded.info.eos_token_ids else None
    ids = {"bos_token": loaded.info.bos_token_id, "eos_token": eos}
    texts = {name: loaded.tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
    return {name: text for name, text in texts.items() if text is not None}


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """What the model's makers recommend, by the names of `SamplingParams`; nothing under neutral ones."""
    if config.model.generation_config == "neutral":
        return {}
    values = generation_defaults(config.model_path)
    values.pop("eos_token_ids", None)
    if (most := values.pop("max_new_tokens", None)) is not None:
        values["max_tokens"] = most
    return values
