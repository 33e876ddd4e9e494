"""Weights in files of `torch.save`, one or several with an index. Files are memory-mapped; no code in them is run."""

from collections.abc import Container, Iterator
from pathlib import Path
from pickle import UnpicklingError
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch

from octavo.config.checkpoint_files import TORCH_FILES, first_file
from octavo.errors import CheckpointError
from octavo.loader.base import ModelLoader
from octavo.loader.index import TORCH_INDEX, names_by_shard, warn_of_unused_index
from octavo.loader.safetensors import dense_tensors
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages

_PICKLE, _BYTEARRAY = "data.pkl", b"\nbytearray\n"  # as opcode GLOBAL has it, the only one that torch reads names by


class TorchLoader(ModelLoader):
    """Reads `pytorch_model.bin`, else the shards that its index lists, else `model.pt` or `model.pth`."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors are views of the mapped file."""
        yield from dense_tensors(model)
        yield from read_folder(Path(model.config.path), OtherStages(model))


def read_folder(folder: Path, elsewhere: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder's file or shards, except those `elsewhere`; raises as `TorchLoader.tensors`."""
    found = first_file(folder, TORCH_FILES)
    if found is None:
        raise CheckpointError(f"{folder}: none of {', '.join(TORCH_FILES)}")
    if found.name == TORCH_INDEX:
        for file_name, names in names_by_shard(found).items():
            wanted = [name for name in names if name not in elsewhere]
            if wanted:
                yield from _read_file(folder / file_name, wanted)
        return
    if found.name == TORCH_FILES[0]:
        warn_of_unused_index(found, folder / TORCH_INDEX)
    tensors = read_state_dict(found)
    yield from ((name, tensors[name]) for name in tensors if name not in elsewhere)


def _read_file(path: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of one shard."""
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, although {TORCH_INDEX} lists it")
    tensors = read_state_dict(path)
    for name in names:
        if name not in tensors:
            raise CheckpointError(f"{path}: tensor {name!r} is missing, although {TORCH_INDEX} lists it here")
        yield name, tensors[name]


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Map a file and return its tensors by name. Only tensors and plain containers are unpickled."""
    if not is_zipfile(path):
        how = "torch.save(torch.load(path, weights_only=True), path)"
        raise CheckpointError(
            f"{path}: not a zip archive: damaged, or of torch before 1.6; if so, save it again: {how}"
        )
    _check_archive(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        why = "it asks for code to be run" if "Unsupported" in str(error) or "GLOBAL" in str(error) else "damaged"
        raise CheckpointError(f"{path}: refused, {why}: {str(error).splitlines()[0]}") from error
    except Exception as error:  # whatever a damaged pickle makes of torch's unpickler
        why = (str(error) or repr(error)).splitlines()[0]
        raise CheckpointError(f"{path}: truncated or malformed: {why}") from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{path}: a dict of tensors by name is expected")
    return {name: _checked(path, name, value) for name, value in found.items()}


def _check_archive(path: Path) -> None:
    """Check that the archive cannot take more memory than the file: torch compresses nothing, and tensors need no
    bytearray, which torch lets a pickle of a few bytes make of any size."""
    try:
        with ZipFile(path) as archive:
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != ZIP_STORED]
            pickles = [name for name in archive.namelist() if name.lower().endswith(_PICKLE)]  # as torch finds it
            asks_for_memory = not compressed and len(pickles) == 1 and _BYTEARRAY in archive.read(pickles[0])
    except (BadZipFile, OSError, ValueError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path}: truncated or malformed: {error}") from error
    if compressed:
        raise CheckpointError(f"{path}: {compressed[0]!r} in it is compressed; torch.save writes no such files")
    if len(pickles) != 1:
        raise CheckpointError(f"{path}: one {_PICKLE} in it is expected, found {len(pickles)}")
    if asks_for_memory:
        raise CheckpointError(f"{path}: refused, it makes a bytearray; only tensors are read")


def _checked(path: Path, name: object, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history: parameters may have been saved as such."""
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: a dict of tensors by name is expected, found the name {name!r}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = f"{tensor.dtype} on {tensor.device}, {tensor.layout}"
        raise CheckpointError(f"{path}: tensor {name!r} has no plain values: {kind}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        found = f"of shape {list(tensor.shape)} has only {tensor.untyped_storage().nbytes()} bytes"
        raise CheckpointError(f"{path}: tensor {name!r} {found} in the file")
    return tensor.detach()
