"""Detects the format of a model's weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from octavo.loader.base import ModelLoader, get_model_loader
from octavo.models.interfaces import CausalLM


class AutoLoader(ModelLoader):
    """Delegates to the loader for the model's path: a GGUF file, or a folder with safetensors."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """See `ModelLoader.tensors`."""
        is_file = Path(model.config.path).is_file()
        found = get_model_loader(replace(self.load_config, load_format="gguf" if is_file else "safetensors"))
        return found.tensors(model)
