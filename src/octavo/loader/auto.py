"""Detects the format of a model's weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from octavo.config.engine import LoadFormat
from octavo.errors import CheckpointError
from octavo.loader.base import ModelLoader, get_model_loader
from octavo.loader.index import names_by_shard, no_weights
from octavo.loader.safetensors import FILES as SAFETENSORS_FILES
from octavo.loader.safetensors import names_in_file
from octavo.loader.sharded_state import FILES as SHARDED_FILES
from octavo.loader.tensorized import FILE_NAME as TENSORIZER_FILE
from octavo.loader.torch_pt import INDEX_FILE, SINGLE_FILES, read_state_dict
from octavo.models.interfaces import CausalLM

SAFETENSORS_FILE, SAFETENSORS_INDEX = SAFETENSORS_FILES


class AutoLoader(ModelLoader):
    """Delegates to the loader for what is at the model's path: a GGUF file, or the weights in a folder."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """See `ModelLoader.tensors`."""
        return self._found(model).tensors(model)

    def fill(self, model: CausalLM) -> None:
        """See `ModelLoader.fill`."""
        self._found(model).fill(model)

    def _found(self, model: CausalLM) -> ModelLoader:
        found: LoadFormat = "tensorizer" if self.load_config.tensorizer_uri else _format(Path(model.config.path))
        return get_model_loader(replace(self.load_config, load_format=found))


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in a folder of safetensors or torch files.

    Raises:
        CheckpointError: there are none, or a damaged one.
    """
    for index in (SAFETENSORS_INDEX, INDEX_FILE):
        if (folder / index).is_file():
            return frozenset(name for names in names_by_shard(folder / index).values() for name in names)
    if (folder / SAFETENSORS_FILE).is_file():
        return frozenset(names_in_file(folder / SAFETENSORS_FILE))
    for file_name in SINGLE_FILES:
        if (folder / file_name).is_file():
            return frozenset(read_state_dict(folder / file_name))
    raise CheckpointError(f"{folder}: none of {', '.join((*SAFETENSORS_FILES, *SINGLE_FILES, INDEX_FILE))}")


def _format(path: Path) -> LoadFormat:
    """Return the format of what is at a path. Safetensors come first where there are several.

    Raises:
        CheckpointError: there are no weights.
    """
    if path.is_file():
        return "gguf"
    if any((path / name).is_file() for name in SAFETENSORS_FILES):
        return "safetensors"
    if any(path.glob(SHARDED_FILES)):
        return "sharded_state"
    if any((path / name).is_file() for name in (*SINGLE_FILES, INDEX_FILE)):
        return "pt"
    if (path / TENSORIZER_FILE).is_file():
        return "tensorizer"
    raise no_weights(path)
