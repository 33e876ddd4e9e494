"""What tensors a checkpoint has, from the headers of its files: nothing is loaded. Files of torch need torch for it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.errors import CheckpointError
from octavo.loader.index import names_by_shard, no_weights
from octavo.loader.tensorizer_index import read_index

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_TENSORIZER_FILE, _TORCH_FILES = "model.tensors", ("pytorch_model.bin*", "model.pt", "model.pth")
_METADATA = "__metadata__"
_LENGTH_BYTES = 8  # of the header, in front of it
# Bits of an element, by the names of the format (github.com/huggingface/safetensors).
_BITS = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        "F4": 4,
    }
)


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
    text, num_bytes = _header(file)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed header: {error!r}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: malformed header: an object is expected")
    entries.pop(_METADATA, None)
    for name, entry in entries.items():
        yield _checked(file, name, entry, num_bytes)
    if sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()) != num_bytes:
        raise CheckpointError(f"{file}: truncated or malformed: its tensors are not the {num_bytes} bytes that follow")


def _checked(file: Path, name: str, entry: Any, num_bytes: int) -> StoredTensor:
    """Return a tensor as a header describes it, in a file with so many bytes of values."""
    if not isinstance(entry, dict):
        entry = {}
    shape, kind, offsets = (entry.get(key) for key in ("shape", "dtype", "data_offsets"))
    is_sound = _are_sizes(shape) and isinstance(kind, str) and _are_sizes(offsets) and len(offsets) == 2
    if not is_sound or not offsets[0] <= offsets[1] <= num_bytes:
        raise CheckpointError(f"{file}: malformed header: tensor {name!r} cannot be {str(entry)[:200]}")
    size = offsets[1] - offsets[0]
    if kind in _BITS and prod(shape) * _BITS[kind] != 8 * size:
        raise CheckpointError(f"{file}: malformed header: tensor {name!r} of shape {shape} in {kind} has {size} bytes")
    return StoredTensor(name, tuple(shape), kind, size)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _header(file: Path) -> tuple[bytes, int]:
    """Return the text of a header, and how many bytes follow it."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    try:
        with file.open("rb") as opened:
            num_bytes = file.stat().st_size
            size = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if size > num_bytes - _LENGTH_BYTES:
                raise CheckpointError(f"{file}: truncated, or not a safetensors file")
            return opened.read(size), num_bytes - _LENGTH_BYTES - size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
