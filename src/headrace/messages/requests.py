"""What the frontend sends to the core: requests and control verbs, as data."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.messages.sampling_params import SamplingParams


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="verb", tag="add"):
    """One generation as the core sees it: token ids and resolved parameters, no text.

    ``sampling.seed`` and ``sampling.max_tokens`` are always set here. ``eos_token_ids`` is empty under ``ignore_eos``;
    ``bad_words_token_ids`` holds every spelling of the bad words. Times are `Clock.monotonic` seconds.
    ``owner`` names who sent it, so that explanations tell nobody about others; it decides nothing.
    ``fault`` is a test hook, never set by HTTP: ``phase`` is forward, sample or logits, ``repeat`` is once or always,
    ``at`` is the position from which it strikes.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    arrival_time: float = 0.0
    client_index: int = 0
    priority: int = 0
    cache_salt: str | None = None
    owner: str | None = None
    lora_name: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    fault: dict[str, Any] | None = None


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", omit_defaults=True):
    """Base of the control verbs. A verb with a ``call_id`` is answered by exactly one `ControlReply`."""

    call_id: int | None = None


class Abort(ControlRequest, frozen=True, kw_only=True, tag="abort"):
    """End requests; unknown and finished ids are ignored."""

    request_ids: list[str]


class Drain(ControlRequest, frozen=True, kw_only=True, tag="drain"):
    """Admit nothing more and answer when the last request has ended."""


class Sleep(ControlRequest, frozen=True, kw_only=True, tag="sleep"):
    """Give memory back: level 1 drops KV blocks, level 2 weights too."""

    level: int = 1


class Wake(ControlRequest, frozen=True, kw_only=True, tag="wake"):
    """Take the memory again; ``tags`` empty means everything."""

    tags: tuple[str, ...] = ()


class Reload(ControlRequest, frozen=True, kw_only=True, tag="reload"):
    """Load weights again, from ``path`` or from where they came."""

    path: str | None = None


class ResetPrefixCache(ControlRequest, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Forget all hashes; with ``reset_running`` running requests are preempted first."""

    reset_running: bool = False


class AddLora(ControlRequest, frozen=True, kw_only=True, tag="add_lora"):
    """Load an adapter under a name."""

    name: str
    path: str


class Profile(ControlRequest, frozen=True, kw_only=True, tag="profile"):
    """Start or stop a profile."""

    start: bool


class Stop(ControlRequest, frozen=True, kw_only=True, tag="stop"):
    """End the core after the step in progress; what still runs is aborted."""


class Query(ControlRequest, frozen=True, kw_only=True, tag="query"):
    """Ask for a read-only view by name (``config``, ``attention``, ``requests``, …); the reply's value is its data."""

    topic: str
    argument: str | None = None


AnyControl = Abort | Drain | Sleep | Wake | Reload | ResetPrefixCache | AddLora | Profile | Stop | Query
ToCore = EngineCoreRequest | AnyControl
