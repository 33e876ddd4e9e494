"""Maps architecture names, as in `config.json`, to classes. A model's module is imported on demand."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.errors import UnsupportedModelError, nearest_hint

if TYPE_CHECKING:
    from octavo.config.model import ModelConfig
    from octavo.layers.context import BuildContext
    from octavo.models.interfaces import CausalLM

MODEL_MODULES = MappingProxyType(
    {
        "Gemma3ForCausalLM": "octavo.models.gemma3",
        "Gemma3ForConditionalGeneration": "octavo.models.gemma3_vision",
        "LlamaForCausalLM": "octavo.models.llama",
        "LlavaForConditionalGeneration": "octavo.models.llava",
        "MistralForCausalLM": "octavo.models.mistral",
        "MixtralForCausalLM": "octavo.models.mixtral",
        "Qwen2ForCausalLM": "octavo.models.qwen2",
        "Qwen2MoeForCausalLM": "octavo.models.qwen2_moe",
        "Qwen3ForCausalLM": "octavo.models.qwen3",
        "Qwen3MoeForCausalLM": "octavo.models.qwen3_moe",
        "Qwen2VLForConditionalGeneration": "octavo.models.qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "octavo.models.qwen2_5_vl",
        "Qwen3VLForConditionalGeneration": "octavo.models.qwen3_vl",
    }
)


def initialize_model(config: "ModelConfig", context: "BuildContext") -> "CausalLM":
    """Build the model without weights.

    Raises:
        UnsupportedModelError: unknown architecture; the message suggests the closest.
    """
    name = config.architecture
    if name not in MODEL_MODULES:
        hint = nearest_hint(name, sorted(MODEL_MODULES))
        raise UnsupportedModelError(f"{config.path}: architecture {name!r} is not supported; {hint}")
    model: CausalLM = getattr(import_module(MODEL_MODULES[name]), name)(config, context)
    return model
