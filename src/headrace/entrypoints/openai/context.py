"""What handlers need of the rest of the server, in one object."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import headrace
from headrace.base.errors import EngineDeadError, InvalidRequestError
from headrace.config.sections import EngineConfig
from headrace.entrypoints.openai.errors import public_cause
from headrace.entrypoints.openai.options import ServerOptions
from headrace.entrypoints.openai.responses_store import ResponseStore
from headrace.frontend.detokenizer import split_text
from headrace.frontend.parsers.registry import get_reasoning_format, get_tool_format
from headrace.observability.metrics import EngineMetrics

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM
    from headrace.frontend.tokenizer import Tokenizer


def make_fingerprint(config: EngineConfig) -> str:
    """A name for what decides the tokens of a seeded request: the same name, the same tokens."""
    model, shape = config.model, config.architecture
    decisive = (
        *(config.model_path, shape.weight_format, model.quantization, model.dtype, model.activations),
        *(config.cache.kv_cache_dtype, config.device.platform, config.device.ops),
        *(config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size),
    )
    digest = hashlib.sha256(repr(decisive).encode()).hexdigest()[:8]
    return f"headrace-{headrace.__version__}-{digest}"


class ServerContext:
    """Owns the server's own state: whether it drains, and what is in flight.

    Args:
        llm: the frontend, started.
        model_name: what clients call the model.
        options: of the server.
        metrics: the observer that ``llm`` reports to.

    Raises:
        ConfigError: no such parser of tool calls or of reasoning.
    """

    def __init__(self, llm: AsyncLLM, model_name: str, options: ServerOptions, metrics: EngineMetrics) -> None:
        self.llm = llm
        self.model_name = model_name
        self.options = options
        self.metrics = metrics
        self.started = int(time.time())
        self.fingerprint = make_fingerprint(llm.config)
        self.draining = False
        self.num_in_flight = 0
        self.responses = ResponseStore(options.response_store)
        self.start_up_ms: dict[str, float] = {}
        self.num_followers = 0
        template = llm.chat_template.source if llm.chat_template is not None else ""
        self.tool_format = get_tool_format(llm.config.model.tool_call_parser, template)
        self.reasoning_format = get_reasoning_format(llm.config.model.reasoning_parser, template)

    @property
    def max_model_len(self) -> int:
        """The context in force."""
        return self.llm.input.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.llm.input.limits.vocab_size

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's own sampling values, by field name."""
        return self.llm.input.defaults

    @property
    def dead_reason(self) -> str | None:
        """Why the engine is gone, or ``None``."""
        return self.llm.client.dead_reason

    def illness(self) -> str | None:
        """Why the engine cannot be trusted now, or ``None``."""
        if self.dead_reason is not None:
            return f"the engine has stopped: {public_cause(self.dead_reason)}; the server's log has the details"
        try:
            self.llm.check_health()
        except EngineDeadError as error:
            return public_cause(str(error))
        return None

    def check_model(self, name: str | None) -> str:
        """Return the model's name; raises `InvalidRequestError` for another one.

        What the operator called it on the command line is taken too, but never shown.
        """
        if name is not None and name not in (self.model_name, self.llm.config.model.model):
            message = f"this server has no such model; it serves '{self.model_name}'"
            raise InvalidRequestError(message, param="model", code="model_not_found")
        return self.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `InvalidRequestError` when the model has none."""
        if self.llm.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer", code="no_tokenizer")
        return self.llm.tokenizer

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """One text per id; joined they are the whole text."""
        return split_text(self.tokenizer, token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return self.tokenizer.token_bytes[token_id]
