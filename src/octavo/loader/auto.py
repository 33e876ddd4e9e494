"""Detects the format of a model's weights."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from octavo.config.checkpoint_files import SAFETENSORS_FILES, TORCH_FILES, first_file
from octavo.errors import CheckpointError
from octavo.loader.base import ModelLoader
from octavo.loader.gguf import GgufLoader
from octavo.loader.index import names_by_shard, no_weights
from octavo.loader.safetensors import SafetensorsLoader, names_in_file
from octavo.loader.sharded_state import FILES as SHARDED_FILES
from octavo.loader.sharded_state import ShardedStateLoader
from octavo.loader.tensorized import FILE_NAME as TENSORIZER_FILE
from octavo.loader.tensorized import TensorizerLoader
from octavo.loader.torch_pt import TorchLoader, read_state_dict
from octavo.models.interfaces import CausalLM


class AutoLoader(ModelLoader):
    """Delegates to the loader for what is at the model's path: a GGUF file, or the weights in a folder."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """See `ModelLoader.tensors`."""
        return self._found(model).tensors(model)

    def fill(self, model: CausalLM) -> None:
        """See `ModelLoader.fill`."""
        self._found(model).fill(model)

    def _found(self, model: CausalLM) -> ModelLoader:
        kind = TensorizerLoader if self.load_config.tensorizer_uri else _loader_for(Path(model.config.path))
        return kind(self.load_config)


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in a folder of safetensors or torch files.

    Raises:
        CheckpointError: there are none, or a damaged one.
    """
    file = first_file(folder, (*SAFETENSORS_FILES, *TORCH_FILES))
    if file is None:
        raise CheckpointError(f"{folder}: none of {', '.join((*SAFETENSORS_FILES, *TORCH_FILES))}")
    if file.suffix == ".json":
        return frozenset(name for names in names_by_shard(file).values() for name in names)
    return frozenset(names_in_file(file) if file.name == SAFETENSORS_FILES[0] else read_state_dict(file))


def _loader_for(path: Path) -> type[ModelLoader]:
    """Return the loader of what is at a path. Safetensors come first where there are several formats.

    Raises:
        CheckpointError: there are no weights.
    """
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
