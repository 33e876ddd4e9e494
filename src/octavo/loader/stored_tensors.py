"""What tensors a checkpoint has, from the headers of its files: nothing is loaded. Files of torch need torch for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config.checkpoint_files import read_header
from octavo.errors import CheckpointError
from octavo.loader.index import names_by_shard, no_weights
from octavo.loader.tensorizer_index import read_index

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_TENSORIZER_FILE, _TORCH_FILES = "model.tensors", ("pytorch_model.bin*", "model.pt", "model.pth")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it."""

    name: str
    shape: tuple[int, ...]
    type: str
    num_bytes: int


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a GGUF file or of a folder; where that has several formats, those that would be loaded.

    Raises:
        CheckpointError: damaged, or none are there.
        UnsupportedModelError: a format, or a version of one, that Octavo does not read.
    """
    if path.is_file():
        from octavo.gguf.file import GgufFile  # imports numpy, which `octavo --help` does not need

        for tensor in GgufFile.read(path).tensors.values():
            yield StoredTensor(tensor.name, tensor.shape, tensor.type.name, tensor.data.nbytes)
    elif (path / _SINGLE_FILE).exists():
        yield from _of_header(path / _SINGLE_FILE)
    elif (path / _INDEX_FILE).is_file():
        yield from _of_index(path)
    elif files := sorted(path.glob("*.safetensors")):  # a sharded state, an adapter
        for file in files:
            yield from _of_header(file)
    elif (path / _TENSORIZER_FILE).is_file() and not any(any(path.glob(pattern)) for pattern in _TORCH_FILES):
        yield from _of_tensorizer(path / _TENSORIZER_FILE)
    elif any(any(path.glob(pattern)) for pattern in _TORCH_FILES):
        yield from _of_torch(path)
    else:
        raise no_weights(path)


def _of_index(folder: Path) -> Iterator[StoredTensor]:
    for file_name, names in names_by_shard(folder / _INDEX_FILE).items():
        found = {each.name: each for each in _of_header(folder / file_name)}
        if missing := set(names).difference(found):
            why = f"tensor {min(missing)!r} is missing, although {_INDEX_FILE} lists it here"
            raise CheckpointError(f"{folder / file_name}: {why}")
        yield from (found[name] for name in names)


def _of_torch(folder: Path) -> Iterator[StoredTensor]:
    from octavo.loader.torch_pt import read_folder

    for name, tensor in read_folder(folder):
        yield StoredTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


def _of_tensorizer(file: Path) -> Iterator[StoredTensor]:
    with file.open("rb") as opened:
        for entry in read_index(opened.read, file.stat().st_size, str(file)):
            yield StoredTensor(entry.name, entry.shape, entry.dtype, entry.num_bytes)


def _of_header(file: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of one safetensors file."""
    for entry in read_header(file):
        yield StoredTensor(entry.name, entry.shape, entry.type, entry.num_bytes)
