"""headrace: an LLM serving engine. ``from headrace import LLM, SamplingParams`` is the offline interface.

The names are loaded on first use: importing the package imports no torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "headrace.entrypoints.llm",
    "AsyncLLM": "headrace.frontend.async_llm",
    "RequestOutput": "headrace.messages.request_output",
    "SamplingParams": "headrace.messages.sampling_params",
}

if TYPE_CHECKING:
    from headrace.entrypoints.llm import LLM
    from headrace.frontend.async_llm import AsyncLLM
    from headrace.messages.request_output import RequestOutput
    from headrace.messages.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
