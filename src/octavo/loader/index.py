"""The files of a checkpoint: which there must be, which tensor is in which of several, and what tensors they have.

Headers tell all of that: nothing is loaded.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config.checkpoint_files import SAFETENSORS_FILES, TORCH_FILES, HeaderEntry, read_header
from octavo.config.json_fields import JsonFields
from octavo.errors import CheckpointError

logger = logging.getLogger(__name__)

SAFETENSORS_FILE, SAFETENSORS_INDEX = SAFETENSORS_FILES
TORCH_INDEX = TORCH_FILES[1]
TENSORIZER_FILE = "model.tensors"
_TORCH_PATTERNS = ("pytorch_model.bin*", *TORCH_FILES[2:])
_MAX_NAME_BYTES = 255  # of a file, in any file system
_NAMED_AT_MOST = 8


def names_by_shard(index: Path) -> dict[str, list[str]]:
    """Group the tensors that an index file lists by their file, in the same folder."""
    weight_map = JsonFields.read(index).nested("weight_map")
    if not weight_map.values:
        raise weight_map.fail("weight_map", "tensor names and their files are expected")
    shards: dict[str, list[str]] = {}
    for name in weight_map.values:
        file_name = weight_map.text(name)
        if not _is_name(file_name):
            raise weight_map.fail(name, "the name of a file in the same folder is expected")
        shards.setdefault(file_name, []).append(name)
    return shards


def warn_of_unused_index(single: Path, index: Path) -> None:
    """Say that an index has no effect, since a file with the whole model is beside it: tools that save to a folder
    leave the index of earlier shards. transformers takes the single file, too.
    """
    if not index.is_file():
        return
    try:
        is_stale = set(names_by_shard(index)) != {single.name}  # some tools write an index for one file
    except CheckpointError:
        is_stale = True
    if is_stale:
        logger.warning("%s has no effect, nor have files that only it lists: %s is the whole model", index, single.name)


def _is_name(text: str) -> bool:
    """Return whether a text can be the name of a file in a folder; JSON may hold text that cannot be encoded."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        return False
    return Path(text).name == text and text != ".." and "\0" not in text and num_bytes <= _MAX_NAME_BYTES


def no_weights(folder: Path) -> CheckpointError:
    """Return the error of a folder without weights, which says what files it has."""
    found = sorted(each.name for each in folder.iterdir())
    listed = ", ".join(found[:_NAMED_AT_MOST]) + (", ..." if len(found) > _NAMED_AT_MOST else "")
    wanted = ", ".join((SAFETENSORS_FILE, TORCH_FILES[0], *TORCH_FILES[2:], TENSORIZER_FILE))
    also = f"shards with an index, a sharded state; there are {listed or 'no files'}"
    return CheckpointError(f"{folder}: no weights: none of {wanted}, {also}")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it."""

    name: str
    shape: tuple[int, ...]
    type: str
    num_bytes: int


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a GGUF file or of a folder; where that has several formats, those that would be loaded."""
    if path.is_file():
        from octavo.gguf.file import GgufFile  # imports numpy, which `octavo --help` does not need

        for tensor in GgufFile.read(path).tensors.values():
            yield StoredTensor(tensor.name, tensor.shape, tensor.type.name, tensor.data.nbytes)
    elif (path / SAFETENSORS_FILE).exists():
        yield from _stored(read_header(path / SAFETENSORS_FILE))
    elif (path / SAFETENSORS_INDEX).is_file():
        yield from _of_index(path)
    elif files := sorted(path.glob("*.safetensors")):  # a sharded state, or what fine-tuning made
        for file in files:
            yield from _stored(read_header(file))
    elif any(any(path.glob(pattern)) for pattern in _TORCH_PATTERNS):
        from octavo.loader.torch_pt import read_folder

        for name, values in read_folder(path):
            yield StoredTensor(name, tuple(values.shape), str(values.dtype).removeprefix("torch."), values.nbytes)
    elif (path / TENSORIZER_FILE).is_file():
        from octavo.loader.tensorized import read_index

        single = path / TENSORIZER_FILE
        with single.open("rb") as opened:
            yield from _stored(read_index(opened.read, single.stat().st_size, str(single)))
    else:
        raise no_weights(path)


def _of_index(folder: Path) -> Iterator[StoredTensor]:
    for file_name, names in names_by_shard(folder / SAFETENSORS_INDEX).items():
        found = {each.name: each for each in _stored(read_header(folder / file_name))}
        if missing := set(names).difference(found):
            why = f"tensor {min(missing)!r} is missing, although {SAFETENSORS_INDEX} lists it here"
            raise CheckpointError(f"{folder / file_name}: {why}")
        yield from (found[name] for name in names)


def _stored(entries: Iterable[HeaderEntry]) -> Iterator[StoredTensor]:
    for entry in entries:
        yield StoredTensor(entry.name, entry.shape, entry.type, entry.num_bytes)
