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
        "Gemma3ForConditionalGeneration": "octavo.models.gemma3",
        "LlamaForCausalLM": "octavo.models.llama",
        "LlavaForConditionalGeneration": "octavo.models.llava",
        "MistralForCausalLM": "octavo.models.llama",
        "MixtralForCausalLM": "octavo.models.moe",
        "Qwen2ForCausalLM": "octavo.models.llama",
        "Qwen2MoeForCausalLM": "octavo.models.moe",
        "Qwen3ForCausalLM": "octavo.models.llama",
        "Qwen3MoeForCausalLM": "octavo.models.moe",
        "Qwen2VLForConditionalGeneration": "octavo.models.qwen_vl",
        "Qwen2_5_VLForConditionalGeneration": "octavo.models.qwen_vl",
        "Qwen3VLForConditionalGeneration": "octavo.models.qwen_vl",
    }
)


def initialize_model(config: "ModelConfig", context: "BuildContext") -> "CausalLM":
    """Build the model without weights."""
    name = config.architecture
    if name not in MODEL_MODULES:
        hint = nearest_hint(name, sorted(MODEL_MODULES))
        raise UnsupportedModelError(f"{config.path}: architecture {name!r} is not supported; {hint}")
    model: CausalLM = getattr(import_module(MODEL_MODULES[name]), name)(config, context)
    return model
