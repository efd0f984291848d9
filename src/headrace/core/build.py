"""Builds an engine core from a configuration and an executor named by dotted path.

Only here are the parts of a core chosen, so that naming an executor (and with it PyTorch) never imports it in a process
that merely starts cores.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import ConfigError, ModelFileError
from headrace.base.last_words import describe_cause
from headrace.base.progress import ProgressWord
from headrace.config.sections import EngineConfig
from headrace.control.grammar.manager import GrammarManager
from headrace.core.engine_core import EngineCore
from headrace.core.grammar_backend import LLGuidanceCompiler, TokenizerSource
from headrace.core.watching import make_watching
from headrace.executor.base import Executor
from headrace.messages.outputs import CoreFailed


def load_factory(path: str) -> Callable[..., Executor]:
    """The function at ``package.module:name``."""
    module, _, name = path.partition(":")
    factory: Callable[..., Executor] = getattr(import_module(module), name)
    return factory


def build_core(
    config: EngineConfig,
    executor: str,
    options: dict[str, Any],
    progress: ProgressWord,
    clock: Clock | None = None,
    *,
    prepares_grammars: bool = False,
) -> EngineCore:
    """Load the model and return a core that can serve.

    Args:
        config: resolved.
        executor: dotted path of its factory, which takes ``options``.
        progress: advances with every step.
        prepares_grammars: once the core rests, have a thread do what the first grammar would stall all others with.

    Raises:
        ConfigError, ModelFileError: the operator's fault, with the remedy.
    """
    made = load_factory(executor)(config, progress, **options)
    try:
        clock = clock or SystemClock()
        watching = make_watching(config, clock)
        compiler = make_compiler(config, clock)
        grammar = GrammarManager(compiler, config.architecture.vocab_size)
        at_rest = [compiler.prepare] if prepares_grammars else []
        return EngineCore(config, made, clock, grammar=grammar, at_rest=at_rest, **watching.parts())
    except BaseException:
        made.shutdown()
        raise


def make_compiler(config: EngineConfig, clock: Clock) -> LLGuidanceCompiler:
    """A compiler of grammars over the model's tokenizer, which is loaded when the first one is asked for."""

    def load() -> TokenizerSource:
        from headrace.model_files.tokenizer import load_tokenizer

        loaded = load_tokenizer(config.model.tokenizer or config.model_path)
        return TokenizerSource.from_loaded(loaded, config.architecture.eos_token_ids)

    return LLGuidanceCompiler(load, config.architecture.vocab_size, clock, config.limits.grammar_timeout_s)


def as_failure(error: BaseException) -> CoreFailed:
    """A start-up error as a message."""
    if isinstance(error, ModelFileError):
        return CoreFailed(kind="model_file", message=str(error))
    if isinstance(error, ConfigError):
        return CoreFailed(kind="config", message=str(error))
    return CoreFailed(kind="internal", message=describe_cause(error))
