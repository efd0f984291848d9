"""Rotary embedding settings of ``config.json`` in their several spellings, made into one `RopeConfig`.

Owns the defaults: after this module no factor is implied. Names in ``RopeConfig.factors``:

| scaling | factors |
|---|---|
| ``linear`` | ``factor`` |
| ``llama3`` | ``factor``, ``low_freq_factor``, ``high_freq_factor``, ``original_max_position`` |
| ``yarn`` | ``factor``, ``original_max_position``, ``attention_factor``, ``beta_fast``, ``beta_slow``, ``truncate`` |
| ``longrope`` | ``original_max_position``, ``attention_factor``; per-frequency divisors in the two lists |
"""

from __future__ import annotations

import math

from headrace.base.errors import ModelFileError
from headrace.config.architecture import RopeConfig
from headrace.model_files.json_file import Fields

SCALINGS = ("none", "linear", "llama3", "yarn", "longrope")
_ALIASES = {"default": "none", "su": "longrope"}


def read_rope(
    settings: Fields | None, *, theta: float, rotary_dim: int, max_position: int, original_max_position: int
) -> RopeConfig:
    """Resolve one table of rope settings.

    Args:
        settings: the ``rope_scaling`` or ``rope_parameters`` table, if there is one.
        theta: base when the table has none.
        rotary_dim: turned dimensions of a head.
        max_position: of the model.
        original_max_position: of the model before its context was extended; used where the table does not say.

    Raises:
        ModelFileError: unknown rule or missing factor.
    """
    if settings is None:
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    theta = settings.number("rope_theta", theta)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    scaling = _ALIASES.get(kind, kind)
    if scaling == "none":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if scaling not in SCALINGS:
        raise ModelFileError(
            f"{settings.origin}: rope type '{kind}' is not supported; supported: {', '.join(SCALINGS)}"
        )
    if scaling == "linear":
        return RopeConfig(theta, rotary_dim, scaling, (("factor", settings.number("factor")),))
    original = float(settings.whole("original_max_position_embeddings", original_max_position))
    if scaling == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factors = tuple((name, settings.number(name)) for name in names)
        return RopeConfig(theta, rotary_dim, scaling, (*factors, ("original_max_position", original)))
    if scaling == "yarn":
        return RopeConfig(theta, rotary_dim, scaling, _yarn_factors(settings, original))
    return _longrope(settings, theta, rotary_dim, max_position, original)


def _yarn_factors(settings: Fields, original: float) -> tuple[tuple[str, float], ...]:
    factor = settings.number("factor")
    attention = settings.get("attention_factor")
    if attention is None:
        mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
        else:
            attention = yarn_magnitude(factor)
    return make_yarn_factors(
        factor,
        original,
        float(attention),
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cos and sin with, for a context extended by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def make_yarn_factors(
    factor: float, original: float, attention: float, *, beta_fast: float, beta_slow: float, truncate: bool = True
) -> tuple[tuple[str, float], ...]:
    """The factors of ``yarn`` under their names."""
    return (
        ("factor", factor),
        ("original_max_position", original),
        ("attention_factor", attention),
        ("beta_fast", beta_fast),
        ("beta_slow", beta_slow),
        ("truncate", float(truncate)),
    )


def _longrope(settings: Fields, theta: float, rotary_dim: int, max_position: int, original: float) -> RopeConfig:
    long_factors, short_factors = settings.floats("long_factor"), settings.floats("short_factor")
    for key, values in (("long_factor", long_factors), ("short_factor", short_factors)):
        if len(values) != rotary_dim // 2:
            raise ModelFileError(f"{settings.origin}: '{key}' has {len(values)} numbers instead of {rotary_dim // 2}")
    attention = settings.get("attention_factor")
    if attention is None:
        factor = max_position / original
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return make_longrope(theta, rotary_dim, original, float(attention), long_factors, short_factors)


def make_longrope(
    theta: float,
    rotary_dim: int,
    original: float,
    attention: float,
    long_factors: tuple[float, ...],
    short_factors: tuple[float, ...],
) -> RopeConfig:
    """``longrope``: frequencies divided one by one, by another list beyond the original context."""
    factors = (("original_max_position", original), ("attention_factor", attention))
    return RopeConfig(theta, rotary_dim, "longrope", factors, long_factors, short_factors)
