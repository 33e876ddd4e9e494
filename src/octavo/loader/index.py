"""The files of a checkpoint: which there must be, and by an index, which tensor is in which of several."""

import logging
from pathlib import Path

from octavo.config.checkpoint_files import SAFETENSORS_FILES, TORCH_FILES
from octavo.config.json_fields import JsonFields
from octavo.errors import CheckpointError

logger = logging.getLogger(__name__)

SAFETENSORS_FILE, SAFETENSORS_INDEX = SAFETENSORS_FILES
TORCH_INDEX = TORCH_FILES[1]
TENSORIZER_FILE = "model.tensors"
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
