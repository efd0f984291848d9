"""What the scheduler asks of grammars, and what grammars ask of whoever compiles them.

The library that compiles lives in ``core``; here are only the shapes, so that control stays free of threads and clocks.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.messages.requests import EngineCoreRequest
from headrace.messages.sampling_params import StructuredOutputParams


class Grammar(Protocol):
    """Grammars by request id. Compilation happens elsewhere; every method returns at once."""

    def start(self, request: EngineCoreRequest) -> None:
        """Begin to compile the grammar of a request with ``structured_outputs``."""
        ...

    def is_ready(self, request_id: str) -> bool:
        """Whether compilation has ended, well or not."""
        ...

    def get_error(self, request_id: str) -> str | None:
        """Why the grammar cannot be used, or can no longer be followed, or ``None``."""
        ...

    def accept(self, request_id: str, token_ids: list[int]) -> str | None:
        """Advance over tokens that are certain; the error when the grammar forbids them."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended; unknown ids are ignored."""
        ...


class Matcher(Protocol):
    """One text under one grammar: where it stands, and what may come next."""

    def accept(self, token_ids: list[int]) -> str | None:
        """Advance over tokens, the one that ends the text included; the error when one of them is not allowed."""
        ...

    def fill_mask(self, words: np.ndarray) -> str | None:
        """Set the bits (lowest first) of the tokens that may come next in int32 ``words``.

        Returns:
            Why that could not be told; then no bit is set.
        """
        ...


class Compilation(Protocol):
    """A grammar that is being compiled somewhere else."""

    @property
    def done(self) -> bool:
        """Whether it has ended: well, with an error, or because its time was over."""
        ...

    def get_error(self) -> str | None:
        """Why there is no grammar; only when `done`."""
        ...

    def make_matcher(self) -> Matcher:
        """A matcher at the start of a text; only when `done` without error."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars; equal ones may share the work."""

    def compile(self, params: StructuredOutputParams) -> Compilation:
        """Begin to compile; returns at once."""
        ...
