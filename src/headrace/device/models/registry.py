"""Which class serves which architecture."""

from __future__ import annotations

from headrace.base.errors import ModelFileError
from headrace.base.registry import Registry
from headrace.device.models.decoder import Decoder
from headrace.device.models.gemma import GemmaModel
from headrace.device.models.llama import LlamaModel
from headrace.device.models.olmo2 import Olmo2Model
from headrace.device.models.phi3 import Phi3Model

MODELS: Registry[type[Decoder]] = Registry("architecture")
MODELS.register("LlamaForCausalLM")(LlamaModel)
MODELS.register("MistralForCausalLM")(LlamaModel)
# Qwen's biases and head norms are switches of the architecture record; the common decoder has them.
MODELS.register("Qwen2ForCausalLM")(Decoder)
MODELS.register("Qwen3ForCausalLM")(Decoder)
MODELS.register("Gemma2ForCausalLM")(GemmaModel)
MODELS.register("Gemma3ForCausalLM")(GemmaModel)
MODELS.register("Phi3ForCausalLM")(Phi3Model)
MODELS.register("Olmo2ForCausalLM")(Olmo2Model)


def get_model_class(architecture: str) -> type[Decoder]:
    """Return the class for an architecture name.

    Raises:
        ModelFileError: not supported; the message lists what is.
    """
    if architecture not in MODELS:
        raise ModelFileError(f"architecture {architecture} is not supported; supported: {', '.join(MODELS)}")
    return MODELS.get(architecture)
