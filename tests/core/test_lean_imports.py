"""What a core process leaves unimported stays so while it serves, and is whole for whoever looks."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from headrace.base.postponed_imports import postpone
from headrace.core.process import _SELDOM_USED
postpone(_SELDOM_USED)
import headrace.executor.uniproc
import torch
for name in _SELDOM_USED:
    assert type(sys.modules[name]).__name__ == "_Postponed", name
with torch.inference_mode():
    torch.softmax(torch.ones(3, 4) @ torch.ones(4, 2), -1)
for name in _SELDOM_USED:
    assert type(sys.modules[name]).__name__ == "_Postponed", name
assert callable(torch._meta_registrations.register_meta)
assert (torch.empty(3, 4, device="meta") @ torch.empty(4, 2, device="meta")).shape == (3, 2)
"""


@pytest.mark.slow
def test_seldom_used_modules_are_there_when_they_are_needed() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=100)
