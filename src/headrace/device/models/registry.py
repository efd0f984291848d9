"""Which class serves which architecture."""

from __future__ import annotations

from headrace.base.errors import ModelFileError
from headrace.base.registry import Registry
from headrace.device.models.decoder import Decoder
from headrace.device.models.llama import LlamaModel

MODELS: Registry[type[Decoder]] = Registry("architecture")
MODELS.register("LlamaForCausalLM")(LlamaModel)
MODELS.register("MistralForCausalLM")(LlamaModel)


def get_model_class(architecture: str) -> type[Decoder]:
    """Return the class for an architecture name.

    Raises:
        ModelFileError: not supported; the message lists what is.
    """
    if architecture not in MODELS:
        raise ModelFileError(f"architecture {architecture} is not supported; supported: {', '.join(MODELS)}")
    return MODELS.get(architecture)
