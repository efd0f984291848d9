"""Which attention backend serves, and why each other one does not: a pure function of the needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from headrace.device.attention.backend import AttentionBackend, AttentionNeeds


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen backend, the reason, and the refusal of every other one by name."""

    backend: AttentionBackend
    reason: str
    refused: dict[str, str]


def select_backend(
    backends: Sequence[AttentionBackend], needs: AttentionNeeds, wanted: str | None = None
) -> AttentionChoice:
    """Choose among ``backends``, given in order of preference.

    Args:
        wanted: the name of the only backend to accept.

    Raises:
        ConfigError: the wanted backend is unknown or cannot serve, or none can; the message gives the reasons.
    """
    refused: dict[str, str] = {}
    usable: list[AttentionBackend] = []
    for backend in backends:
        why_not = backend.refuse(needs)
        if why_not is None:
            usable.append(backend)
        else:
            refused[backend.name] = why_not
    if wanted is not None:
        return _take_wanted(backends, usable, refused, wanted)
    if not usable:
        reasons = "; ".join(f"{name} {why}" for name, why in refused.items())
        raise ConfigError(f"no attention backend can serve this model here: {reasons}")
    chosen = usable[0]
    for other in usable[1:]:
        refused[other.name] = f"{chosen.name} is preferred"
    reason = "the preferred one of those that can serve" if len(usable) > 1 else "the only one that can serve"
    return AttentionChoice(chosen, reason, refused)


def _take_wanted(
    backends: Sequence[AttentionBackend], usable: Sequence[AttentionBackend], refused: dict[str, str], wanted: str
) -> AttentionChoice:
    if all(backend.name != wanted for backend in backends):
        known = ", ".join(backend.name for backend in backends)
        raise ConfigError(f"unknown attention backend '{wanted}'; known: {known}")
    if wanted in refused:
        raise ConfigError(f"attention backend '{wanted}' cannot serve: it {refused[wanted]}")
    chosen = next(backend for backend in usable if backend.name == wanted)
    for other in usable:
        if other is not chosen:
            refused[other.name] = f"{wanted} was asked for"
    return AttentionChoice(chosen, "asked for", refused)
