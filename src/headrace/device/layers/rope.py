"""Tables of rotary angles: no scaling, linear, llama3, yarn and longrope, over all or part of a head.

A table is float32 ``[max_position, rotary_dim]``, cosines first. Angles are formed in float32 like the models' authors
do, so that long positions agree with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from headrace.config.architecture import RopeConfig


def make_rope_table(rope: RopeConfig, max_position: int) -> torch.Tensor:
    """Build the table.

    Args:
        rope: the rule, with every number that it needs (`model_files` resolves them).
        max_position: rows, the longest sequence served.
    """
    factors = dict(rope.factors)
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        inv_freq = inv_freq / factors["factor"]
    elif rope.scaling == "llama3":
        inv_freq = _llama3(inv_freq, factors)
    elif rope.scaling == "yarn":
        inv_freq = _yarn(inv_freq, factors, rope)
    elif rope.scaling == "longrope":
        inv_freq = _longrope(inv_freq, factors, rope, max_position)
    else:
        assert rope.scaling == "none", rope.scaling
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    amplitude = factors.get("attention_factor", 1.0)
    return torch.cat([angles.cos() * amplitude, angles.sin() * amplitude], dim=-1).contiguous()


def _llama3(inv_freq: torch.Tensor, factors: Mapping[str, float]) -> torch.Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    low, high = factors["low_freq_factor"], factors["high_freq_factor"]
    turns = factors["original_max_position"] * inv_freq / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factors["factor"] + blend * inv_freq


def _yarn(inv_freq: torch.Tensor, factors: Mapping[str, float], rope: RopeConfig) -> torch.Tensor:
    """Frequencies that turn often are kept, slow ones stretched, with a ramp over the dimensions between."""
    original = factors["original_max_position"]

    def dimension_of(turns: float) -> float:
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(factors["beta_fast"]), dimension_of(factors["beta_slow"])
    if factors["truncate"]:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / factors["factor"] * ramp + inv_freq * (1 - ramp)


def _longrope(
    inv_freq: torch.Tensor, factors: Mapping[str, float], rope: RopeConfig, max_position: int
) -> torch.Tensor:
    """A divisor per frequency: the long set when longer sequences than the original ones may come, for all of them.

    One set for the whole engine keeps cached keys valid when a sequence grows past the border.
    """
    divisors = rope.long_factors if max_position > factors["original_max_position"] else rope.short_factors
    assert len(divisors) == rope.rotary_dim // 2, (len(divisors), rope.rotary_dim)
    return inv_freq / torch.tensor(divisors, dtype=torch.float32)
