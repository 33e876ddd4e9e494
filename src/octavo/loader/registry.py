"""Selects the loader of a weight format; where none is named, by the files that a model has."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from octavo.config.checkpoint_files import SAFETENSORS_FILES, TORCH_FILES, first_file
from octavo.config.engine import LoadConfig
from octavo.errors import InvalidParameterError
from octavo.loader.base import ModelLoader
from octavo.loader.dummy import DummyLoader
from octavo.loader.gguf import GgufLoader
from octavo.loader.index import TENSORIZER_FILE, no_weights
from octavo.loader.safetensors import SafetensorsLoader
from octavo.loader.sharded_state import SHARDED_FILES, ShardedStateLoader
from octavo.loader.tensorized import TensorizerLoader
from octavo.loader.torch_pt import TorchLoader
from octavo.models.interfaces import CausalLM


class AutoLoader(ModelLoader):
    """Delegates to the loader for what is at the model's path: a GGUF file, or the weights in a folder."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        return self._found(model).tensors(model)

    def fill(self, model: CausalLM) -> None:
        self._found(model).fill(model)

    def _found(self, model: CausalLM) -> ModelLoader:
        kind = TensorizerLoader if self.load_config.tensorizer_uri else _loader_for(Path(model.config.path))
        return kind(self.load_config)


def _loader_for(path: Path) -> type[ModelLoader]:
    """Return the loader of what is at a path. Safetensors come first where there are several formats."""
    if path.is_file():
        return GgufLoader
    if first_file(path, SAFETENSORS_FILES):
        return SafetensorsLoader
    if any(path.glob(SHARDED_FILES)):
        return ShardedStateLoader
    if first_file(path, TORCH_FILES):
        return TorchLoader
    if (path / TENSORIZER_FILE).is_file():
        return TensorizerLoader
    raise no_weights(path)


_LOADERS: dict[str, type[ModelLoader]] = {  # by load_format
    "auto": AutoLoader,
    "safetensors": SafetensorsLoader,
    "pt": TorchLoader,
    "gguf": GgufLoader,
    "tensorizer": TensorizerLoader,
    "sharded_state": ShardedStateLoader,
    "dummy": DummyLoader,
}


def get_model_loader(load_config: LoadConfig) -> ModelLoader:
    """Return the loader of `load_config.load_format`. Raises InvalidParameterError: an unknown format."""
    name = load_config.load_format
    if name not in _LOADERS:
        raise InvalidParameterError("load_format", name, "unknown; one of " + ", ".join(_LOADERS))
    return _LOADERS[name](load_config)
