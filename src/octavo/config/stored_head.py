"""Finds the logits head of a checkpoint whose config says that it is the embedding ("tied").

Fine-tuning tools write such checkpoints with a head of their own. Whether it differs decides what is computed and how
much memory it takes, so files are looked at before anything is built; without torch, as the configuration is read.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config.json_fields import JsonFields
from octavo.config.safetensors_header import HeaderEntry, read_header
from octavo.config.torch_entries import TorchEntry, read_entries

logger = logging.getLogger(__name__)

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_TORCH_FILES, _TORCH_INDEX = ("pytorch_model.bin", "model.pt", "model.pth"), "pytorch_model.bin.index.json"
_HEAD, _TABLE, _WEIGHT = "lm_head", "embed_tokens", "weight"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """Where a file has a tensor's values, and what they are."""

    file: Path
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    kind: object  # equal bytes of equal shapes and kinds are equal tensors


def has_own_head(folder: Path) -> bool:
    """Return whether a checkpoint has a logits head that differs from its embedding; a warning says so.

    A quantized head differs: the embedding's values are not in the file in this form.

    Raises:
        CheckpointError: a damaged file.
    """
    found = _parts(folder)
    head, table = found.get(f"{_HEAD}.{_WEIGHT}"), found.get(f"{_TABLE}.{_WEIGHT}")
    others = {name for name in found if name.startswith(f"{_HEAD}.")} - {f"{_HEAD}.{_WEIGHT}", f"{_HEAD}.bias"}
    if not others and (head is None or table is None or _are_equal(head, table)):
        return False
    said = f"{folder}: tie_word_embeddings is true, but the file has an lm_head"
    if not others and head is not None and table is not None and head.shape != table.shape:
        logger.warning("%s of shape %s: it is not used", said, list(head.shape))
        return False
    logger.warning("%s that differs from embed_tokens: it is used", said)
    return True


def _parts(folder: Path) -> dict[str, _Tensor]:
    """Return the tensors of head and embedding by the last two parts of their names."""
    return {
        f"{module}.{name}": tensor
        for path, tensor in _tensors(folder)
        for module, name in [path.split(".")[-2:]]
        if module in (_HEAD, _TABLE)
    }


def _tensors(folder: Path) -> Iterator[tuple[str, _Tensor]]:
    """Yield head and embedding of a folder's safetensors or torch files, by full names; of other formats nothing."""
    single, index = folder / _SINGLE_FILE, folder / _INDEX_FILE
    if single.is_file() or index.is_file():
        for file in [single] if single.is_file() else _shards(index):
            for entry in read_header(file):
                if _is_wanted(entry.name):
                    yield entry.name, _tensor(file, entry, entry.type)
        return
    torch_index = folder / _TORCH_INDEX
    files = [folder / name for name in _TORCH_FILES if (folder / name).is_file()][:1]
    if torch_index.is_file() and not (folder / _TORCH_FILES[0]).is_file():
        files = _shards(torch_index)
    for file in files:
        for name, torch_entry in read_entries(file).items():
            if _is_wanted(name):
                yield name, _tensor(file, torch_entry, torch_entry.kind)


def _tensor(file: Path, entry: HeaderEntry | TorchEntry, kind: object) -> _Tensor:
    return _Tensor(file=file, start=entry.start, num_bytes=entry.num_bytes, shape=entry.shape, kind=kind)


def _is_wanted(name: str) -> bool:
    return f".{name}".rpartition(".")[0].endswith((f".{_HEAD}", f".{_TABLE}"))


def _shards(index: Path) -> list[Path]:
    """Return the files that have a head or an embedding; files elsewhere are refused by the loader."""
    weight_map = JsonFields.read(index).nested("weight_map")
    names = {weight_map.text(name) for name in weight_map.values if _is_wanted(name)}
    return [index.parent / name for name in sorted(names) if Path(name).name == name]


def _are_equal(one: _Tensor, other: _Tensor) -> bool:
    if (one.shape, one.kind, one.num_bytes) != (other.shape, other.kind, other.num_bytes):
        return False
    if (one.file, one.start) == (other.file, other.start):
        return True
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for start in range(0, one.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, one.num_bytes - start)
            if first.read(size) != second.read(size):
                return False
    return True
