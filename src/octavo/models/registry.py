"""Finds a model's class by its family. Its module is imported on demand."""

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.config import families

if TYPE_CHECKING:
    from octavo.config.model import ModelConfig
    from octavo.layers.context import BuildContext
    from octavo.models.interfaces import CausalLM


def initialize_model(config: "ModelConfig", context: "BuildContext") -> "CausalLM":
    """Build the model without weights."""
    if config.impl == "transformers":
        module, name = "octavo.models.fallback", "FallbackForCausalLM"
    else:
        module, _, name = families.FAMILIES[config.architecture].model.partition(":")
    model: CausalLM = getattr(import_module(module), name)(config, context)
    return model
