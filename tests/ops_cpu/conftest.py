"""Fixtures of the native operators. Every team is made once: threads are not free."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import pytest
import torch

from headrace.device.ops.cpu.ops import NativeOps, available_isas
from headrace.device.ops.reference.ops import ReferenceOps


@cache
def make_ops(threads: int = 2, activations: Literal["exact", "int8"] = "int8", isa: str | None = None) -> NativeOps:
    """The operators of one team."""
    return NativeOps(threads, activations, isa)


def all_teams(activations: Literal["exact", "int8"] = "int8") -> list[NativeOps]:
    """Every instruction set of this machine with one thread and with two."""
    return [make_ops(threads, activations, isa) for isa in available_isas() for threads in (1, 2)]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference() -> ReferenceOps:
    """The oracle."""
    return ReferenceOps()
