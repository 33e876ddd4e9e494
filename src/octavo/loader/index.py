"""The files of a checkpoint: which there must be, and by an index, which tensor is in which of several."""

import logging
from pathlib import Path

from octavo.config.json_fields import JsonFields
from octavo.errors import CheckpointError

logger = logging.getLogger(__name__)

_MAX_NAME_BYTES = 255  # of a file, in any file system
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.pt", "model.pth", "model.tensors")
_NAMED_AT_MOST = 8


def names_by_shard(index: Path) -> dict[str, list[str]]:
    """Group the tensors that an index file lists by their file, in the same folder.

    Raises:
        CheckpointError: malformed, empty, or with the name of a file elsewhere.
    """
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
    wanted = f"{', '.join(_WEIGHTS)}, shards with an index, a sharded state"
    return CheckpointError(f"{folder}: no weights: none of {wanted}; there are {listed or 'no files'}")
