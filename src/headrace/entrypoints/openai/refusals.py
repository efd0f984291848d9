"""Fields that headrace does not act on: which values change nothing, and what is said about all others.

One table for every route. A stage that implements a field takes its row out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Refusal:
    """``harmless`` tells whether a value (never null) asks for nothing; ``reason`` completes "<field>: …"."""

    reason: str
    harmless: Callable[[Any], bool] = lambda value: False


def one_of(*values: Any) -> Callable[[Any], bool]:
    """A test for these values and no others, not even equal ones of another type."""
    return lambda value: any(type(value) is type(known) and value == known for known in values)


REFUSALS: dict[str, Refusal] = {
    # They inform or file, but do not change the answer.
    "user": Refusal("must be a string", lambda value: isinstance(value, str)),
    "safety_identifier": Refusal("must be a string", lambda value: isinstance(value, str)),
    "prompt_cache_key": Refusal("must be a string; use cache_salt to keep caches apart", lambda v: isinstance(v, str)),
    "prediction": Refusal("must be an object", lambda value: isinstance(value, dict)),
    "store": Refusal("answers are not stored; leave it out", one_of(False)),
    "service_tier": Refusal("there is one tier; use auto or default", one_of("auto", "default")),
    "modalities": Refusal('answers are text only; use ["text"]', one_of(["text"])),
    "verbosity": Refusal("not supported by this model; leave it out", one_of("medium")),
    # They would change the answer.
    "functions": Refusal("deprecated; send tools"),
    "function_call": Refusal("deprecated and not supported", one_of("none", "auto")),
    "audio": Refusal("answers are text only"),
    "web_search_options": Refusal("the server does not search the web"),
    "documents": Refusal("not supported; put the text into the messages", one_of([])),
    "suffix": Refusal("this model cannot fill in the middle", one_of("")),
    "echo": Refusal("chat answers do not repeat the prompt", one_of(False)),
    "chat_template": Refusal("templates in requests are not allowed; the operator sets one with --chat-template"),
    "use_beam_search": Refusal("not supported", one_of(False)),
    "length_penalty": Refusal("belongs to beam search, which is not supported", one_of(1.0, 1)),
    "truncate_prompt_tokens": Refusal("not supported; shorten the prompt"),
    "kv_transfer_params": Refusal("no KV connector is configured"),
}


def check_refusals(body: Any, skip: frozenset[str] = frozenset(), rules: Mapping[str, Refusal] = REFUSALS) -> None:
    """Raise `InvalidRequestError` for the first field of ``body`` that asks for something not done.

    Args:
        body: a request struct.
        skip: fields that this body's route does act on.
        rules: the table of this route.
    """
    for name in body.__struct_fields__:
        rule = rules.get(name)
        if rule is None or name in skip:
            continue
        value = getattr(body, name)
        if value is not None and not rule.harmless(value):
            raise InvalidRequestError(f"{name}: {rule.reason}", param=name, code="unsupported_parameter")
