"""Detects the format of a model's weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from octavo.config.engine import LoadFormat
from octavo.loader.base import ModelLoader, get_model_loader
from octavo.loader.torch_pt import INDEX_FILE, SINGLE_FILES
from octavo.models.interfaces import CausalLM


class AutoLoader(ModelLoader):
    """Delegates to the loader for the model's path: a GGUF file, or a folder with safetensors or `torch.save` files."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """See `ModelLoader.tensors`."""
        return get_model_loader(replace(self.load_config, load_format=_format(Path(model.config.path)))).tensors(model)


def _format(path: Path) -> LoadFormat:
    """Return the format of what is at a path. Safetensors come first where there are several."""
    if path.is_file():
        return "gguf"
    has_pt = any((path / name).is_file() for name in (*SINGLE_FILES, INDEX_FILE))
    return "pt" if has_pt and not any(path.glob("*.safetensors")) else "safetensors"
