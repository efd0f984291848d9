"""Structured outputs at the edge: whatever cannot be enforced is refused before any token.

A constraint is compiled here exactly as the core will compile it, on a thread and within the time limit; what succeeded
is remembered, so that the same one costs nothing the next time. A JSON schema goes on as it is after the checks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from typing import Any

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import InvalidRequestError
from headrace.config.sections import LimitsSection
from headrace.core.daemon_pool import DaemonPool, PoolFullError
from headrace.core.grammar_backend import GrammarCompilation, LLGuidanceCompiler, TokenizerSource
from headrace.frontend.json_schema import clean_schema
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.validation import check_structured_outputs
from headrace.messages.sampling_params import SamplingParams, StructuredOutputParams

PARAM = "structured_outputs"
POLL_S = 0.25
INLINE_CHARS = 4096
"""Schemas up to this length are checked on the event loop."""


class StructuredOutputChecker:
    """See the module.

    Args:
        tokenizer: ``None`` refuses every constraint.
        eos_token_ids: every id that ends a text.
        vocab_size: width of the logits.
        clock: for the time limit.
        most: what the operator allows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        clock: Clock,
        most: LimitsSection,
    ) -> None:
        self._most = most
        self._pool = DaemonPool("schemas", num_threads=1, limit=64)
        self._compiler: LLGuidanceCompiler | None = None
        if tokenizer is not None:
            backend = tokenizer.backend
            self._compiler = LLGuidanceCompiler(
                lambda: TokenizerSource.from_backend(backend, eos_token_ids), vocab_size, clock, most.grammar_timeout_s
            )

    async def prepare(self) -> None:
        """Do what the first constraint would wait for."""
        if self._compiler is not None:
            await asyncio.wrap_future(self._compiler.prepare())

    async def check(self, params: SamplingParams, param: str = PARAM) -> SamplingParams:
        """Return the parameters with the constraint as it goes to the core.

        Raises:
            InvalidRequestError: the constraint cannot be enforced, or not in time.
        """
        if params.structured_outputs is None:
            return params
        self._check(params, param)
        asked = params.structured_outputs
        if len(asked.json or asked.structural_tag or "") <= INLINE_CHARS:
            cleaned = _clean(asked, param, self._most)
        else:
            try:
                cleaned = await asyncio.wrap_future(self._pool.submit(lambda: _clean(asked, param, self._most)))
            except PoolFullError:
                raise InvalidRequestError(f"{param}: too many schemas wait to be checked", param=param) from None
        compilation = self._compile(cleaned)
        while not compilation.done:
            await asyncio.wait({asyncio.wrap_future(compilation.future)}, timeout=POLL_S)
        return _finish(params, cleaned, compilation, param)

    def check_now(self, params: SamplingParams, param: str = PARAM) -> SamplingParams:
        """The same for callers without an event loop: waits in the caller's thread."""
        if params.structured_outputs is None:
            return params
        self._check(params, param)
        cleaned = _clean(params.structured_outputs, param, self._most)
        compilation = self._compile(cleaned)
        while not compilation.done:
            concurrent.futures.wait([compilation.future], timeout=POLL_S)
        return _finish(params, cleaned, compilation, param)

    def _check(self, params: SamplingParams, param: str) -> None:
        check_structured_outputs(params, self._most, param)
        if self._compiler is None:
            raise InvalidRequestError(f"{param} needs a tokenizer", param=param)

    def _compile(self, cleaned: StructuredOutputParams) -> GrammarCompilation:
        assert self._compiler is not None
        return self._compiler.compile(cleaned)


def _finish(
    params: SamplingParams, cleaned: StructuredOutputParams, compilation: GrammarCompilation, param: str
) -> SamplingParams:
    error = compilation.get_error()
    if error is not None:
        raise InvalidRequestError(f"{param}: {error}", param=param, code="invalid_grammar")
    allowed = params.allowed_token_ids
    if allowed is not None and not any(map(compilation.may_begin_with, allowed)):
        message = f"allowed_token_ids and {param} together forbid every token"
        raise InvalidRequestError(message, param="allowed_token_ids")
    return msgspec.structs.replace(params, structured_outputs=cleaned)


def _clean(asked: StructuredOutputParams, param: str, most: LimitsSection) -> StructuredOutputParams:
    """The constraint with its schemas checked."""
    if asked.json is not None:
        schema = clean_schema(_load(asked.json, param), param, most)
        return msgspec.structs.replace(asked, json=json.dumps(schema, ensure_ascii=False))
    if asked.structural_tag is not None:
        tag = _load(asked.structural_tag, param)
        for structure in tag.get("structures", ()) if isinstance(tag, dict) else ():
            _clean_parts(structure, param, most)
        if isinstance(tag, dict) and "otherwise" in tag:
            tag["otherwise"] = clean_schema(tag["otherwise"], param, most)
        return msgspec.structs.replace(asked, structural_tag=json.dumps(tag, ensure_ascii=False))
    return asked


def _clean_parts(part: Any, param: str, most: LimitsSection) -> None:
    """Check the schemas of one structure of a tag in their places."""
    if isinstance(part, list):
        for item in part:
            _clean_parts(item, param, most)
    elif isinstance(part, dict):
        if "schema" in part:
            part["schema"] = clean_schema(part["schema"], param, most)
        _clean_parts(part.get("parts"), param, most)


def _load(text: str, param: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{param} must be valid JSON", param=param, code="invalid_schema") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)
