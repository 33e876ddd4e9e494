"""The index of a checkpoint in several files: which tensor is in which of them."""

from pathlib import Path

from octavo.config.json_fields import JsonFields

_MAX_NAME_BYTES = 255  # of a file, in any file system


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


def _is_name(text: str) -> bool:
    """Return whether a text can be the name of a file in a folder; JSON may hold text that cannot be encoded."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        return False
    return Path(text).name == text and text != ".." and "\0" not in text and num_bytes <= _MAX_NAME_BYTES
