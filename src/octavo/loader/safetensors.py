"""Loads safetensors files, one or several with an index. Files are memory-mapped and every tensor is read once.

Pages read from a mapping count as this process's memory until it is unmapped. So a file is mapped again every so many
bytes: by then earlier layers are packed, and nothing references the older mapping.
"""

from collections.abc import Container, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import CheckpointError
from octavo.loader.base import ModelLoader
from octavo.loader.index import SAFETENSORS_FILE, SAFETENSORS_INDEX, names_by_shard, warn_of_unused_index
from octavo.loader.read_ahead import ReadAhead
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages

_MAPPED_BYTES = 64 << 20  # read per mapping


class SafetensorsLoader(ModelLoader):
    """Reads `model.safetensors`, else the shards that `model.safetensors.index.json` lists."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors are views of the mapped file; those used only by other stages are skipped."""
        folder, elsewhere = Path(model.config.path), OtherStages(model)
        single, index = folder / SAFETENSORS_FILE, folder / SAFETENSORS_INDEX
        yield from dense_tensors(model)
        if single.is_file():
            warn_of_unused_index(single, index)
            yield from read_file(single, elsewhere)
            return
        if not index.is_file():
            raise CheckpointError(f"{folder}: neither {SAFETENSORS_FILE} nor {SAFETENSORS_INDEX}")
        for file_name, names in names_by_shard(index).items():
            if all(name in elsewhere for name in names):
                continue  # not needed on this stage
            if not (folder / file_name).is_file():
                raise CheckpointError(f"{folder / file_name}: missing, although {SAFETENSORS_INDEX} lists it")
            yield from read_file(folder / file_name, elsewhere, names)


def dense_tensors(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of linears that pooled vectors go through, each in a folder of its own."""
    for step in model.config.pooling.dense if model.stage.is_last else ():
        if not step.folder:
            continue
        folder = Path(model.config.path) / step.folder
        file = folder / SAFETENSORS_FILE
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, although modules.json lists its folder")
        yield from ((f"{step.folder}.{name}", tensor) for name, tensor in read_file(file, ()))


def read_file(
    path: Path, elsewhere: Container[str], names: list[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of one file, None: all, except those `elsewhere`."""
    try:
        found = names_in_file(path)
        wanted = set(found if names is None else names)
        if missing := wanted.difference(found):
            raise CheckpointError(
                f"{path}: tensor {min(missing)!r} is missing, although {SAFETENSORS_INDEX} lists it here"
            )
        remaining = [name for name in found if name in wanted and name not in elsewhere]
        ahead = ReadAhead([path] if remaining else [])
        while remaining:
            yield from _read_mapping(path, remaining, ahead)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or malformed: {error}") from error


def names_in_file(path: Path) -> list[str]:
    """Return the names of a file's tensors, in file order. Raises CheckpointError: truncated or malformed."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or malformed: {error}") from error


def _read_mapping(path: Path, names: list[str], ahead: ReadAhead) -> Iterator[tuple[str, torch.Tensor]]:
    """Map the file and yield the first of the named tensors, up to the limit of one mapping; drop their names."""
    num_bytes = 0
    with safe_open(path, framework="pt") as file:
        while names and num_bytes < _MAPPED_BYTES:
            tensor = file.get_tensor(names[0])
            num_bytes += tensor.nbytes
            yield names.pop(0), tensor
            ahead.used(tensor.nbytes)
            del tensor
