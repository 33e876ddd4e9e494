"""The files of a checkpoint and what tensors are in them, by their headers: nothing is loaded, without torch or NumPy.

So a logits head is found in a checkpoint whose config says that it is the embedding ("tied"): fine-tuning tools write
such checkpoints with a head of their own, and whether it differs decides what is computed.
"""

import io
import json
import logging
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from octavo.config.json_fields import JsonFields
from octavo.errors import CheckpointError

logger = logging.getLogger(__name__)

# Of a folder's files that hold all weights, or list in which files they are, the first that is there counts.
SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json")
TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")

_LENGTH_BYTES = 8  # of a safetensors file's header, in front of it
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
# Bytes of an element, by the class that torch's pickle names for its storage.
_BYTES = MappingProxyType(
    {
        **dict.fromkeys(("DoubleStorage", "LongStorage"), 8),
        **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
        **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
        **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage"), 1),
    }
)
_PICKLE = "data.pkl"
_ZIP_HEADER, _NAME_LENGTH, _EXTRA_LENGTH = 30, slice(26, 28), slice(28, 30)  # of an archive's entry
_HEAD, _TABLES = "lm_head", ("embed_tokens", "embeddings")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a file: `num_bytes` from `start` on hold its values, and none other if it is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int
    strides: tuple[int, ...] = ()  # of torch's files


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of these files that is in the folder."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's safetensors or torch files; of other formats none.

    Raises CheckpointError: a damaged file.
    """
    for names, read in ((SAFETENSORS_FILES, read_header), (TORCH_FILES, read_torch_header)):
        found = first_file(folder, names)
        if found is not None and found.suffix == ".json":
            return set(JsonFields.read(found).nested("weight_map").values)
        if found is not None:
            return {entry.name for entry in read(found)}
    return set()


def has_own_head(folder: Path) -> bool:
    """Return whether a checkpoint has a logits head that differs from its embedding; a warning says so.

    A quantized head differs: the embedding's values are not in the file in this form. Raises CheckpointError: a damaged
    file.
    """
    found = {".".join(entry.name.split(".")[-2:]): (file, entry) for file, entry in _heads_and_tables(folder)}
    head = found.get(f"{_HEAD}.weight")
    table = next((found[name] for each in _TABLES if (name := f"{each}.weight") in found), None)
    others = {name for name in found if name.startswith(f"{_HEAD}.")} - {f"{_HEAD}.weight", f"{_HEAD}.bias"}
    if not others and (head is None or table is None or _are_equal(*head, *table)):
        return False
    said = f"{folder}: tie_word_embeddings is true, but the file has an lm_head"
    if not others and head is not None and table is not None and head[1].shape != table[1].shape:
        logger.warning("%s of shape %s: it is not used", said, list(head[1].shape))
        return False
    logger.warning("%s that differs from the embedding: it is used", said)
    return True


def lacks_head(folder: Path) -> bool:
    """Return whether a folder's files have an embedding but no logits head, as a base model's."""
    names = {entry.name.split(".")[-2] for _, entry in _heads_and_tables(folder)}
    return not names.isdisjoint(_TABLES) and _HEAD not in names


def _heads_and_tables(folder: Path) -> Iterator[tuple[Path, HeaderEntry]]:
    """Yield head and embedding of a folder's safetensors or torch files; of other formats nothing."""
    for names, read in ((SAFETENSORS_FILES, read_header), (TORCH_FILES, read_torch_header)):
        found = first_file(folder, names)
        if found is not None:
            for file in _shards(found) if found.suffix == ".json" else [found]:
                yield from ((file, entry) for entry in read(file) if _is_head_or_table(entry.name))
            return


def _is_head_or_table(name: str) -> bool:
    return f".{name}".rpartition(".")[0].endswith(tuple(f".{each}" for each in (_HEAD, *_TABLES)))


def _shards(index: Path) -> list[Path]:
    """Return the files that have a head or an embedding; files elsewhere are refused by the loader."""
    weight_map = JsonFields.read(index).nested("weight_map")
    names = {weight_map.text(name) for name in weight_map.values if _is_head_or_table(name)}
    return [index.parent / name for name in sorted(names) if Path(name).name == name]


def _are_equal(file: Path, one: HeaderEntry, other_file: Path, other: HeaderEntry) -> bool:
    kinds = [(each.shape, each.type, each.strides, each.num_bytes) for each in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if (file, one.start) == (other_file, other.start):
        return True
    with file.open("rb") as first, other_file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for start in range(0, one.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, one.num_bytes - start)
            if first.read(size) != second.read(size):
                return False
    return True


def read_header(file: Path) -> Iterator[HeaderEntry]:
    """Yield the tensors of one safetensors file. Raises CheckpointError: missing, truncated or malformed."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            num_bytes = file.stat().st_size - _LENGTH_BYTES - size  # of the values
            if num_bytes < 0:
                raise CheckpointError(f"{file}: truncated, or not a safetensors file")
            entries = json.loads(opened.read(size))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed header: {error!r}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: malformed header: an object is expected")
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        yield _checked(file, name, entry, _LENGTH_BYTES + size, num_bytes)
    if sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()) != num_bytes:
        raise CheckpointError(f"{file}: truncated or malformed: its tensors are not the {num_bytes} bytes that follow")


def _checked(file: Path, name: str, entry: Any, start: int, num_bytes: int) -> HeaderEntry:
    """Return a tensor as a header describes it, in a file whose values are so many bytes from `start` on."""
    if not isinstance(entry, dict):
        entry = {}
    shape, kind, offsets = (entry.get(key) for key in ("shape", "dtype", "data_offsets"))
    is_sound = _are_sizes(shape) and isinstance(kind, str) and _are_sizes(offsets) and len(offsets) == 2
    if not is_sound or not offsets[0] <= offsets[1] <= num_bytes:
        raise CheckpointError(f"{file}: malformed header: tensor {name!r} cannot be {str(entry)[:200]}")
    size = offsets[1] - offsets[0]
    if kind in _BITS and prod(shape) * _BITS[kind] != 8 * size:
        raise CheckpointError(f"{file}: malformed header: tensor {name!r} of shape {shape} in {kind} has {size} bytes")
    return HeaderEntry(name, tuple(shape), kind, start + offsets[0], size)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def read_torch_header(file: Path) -> list[HeaderEntry]:
    """Return the tensors of a file of `torch.save`; kinds that its loader refuses are left out, and no code is run.

    Raises CheckpointError: not an archive of torch, or damaged.
    """
    try:
        with ZipFile(file) as archive, file.open("rb") as opened:
            places = {entry.filename: entry for entry in archive.infolist()}
            name = next(name for name in places if name.endswith(_PICKLE))
            if places[name].compress_type != ZIP_STORED:
                raise CheckpointError(f"{file}: {name!r} in it is compressed; torch.save writes no such files")
            found = _Unpickler(io.BytesIO(archive.read(name))).load()
            if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
                found = found["state_dict"]
            data, tensors = f"{name.removesuffix(_PICKLE)}data/", found.items() if isinstance(found, dict) else ()
            entries = [_torch_entry(key, value, places, data, opened) for key, value in tensors]
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged archive or pickle makes of their readers
        raise CheckpointError(f"{file}: truncated or malformed: {error!r}") from error
    return [entry for entry in entries if entry is not None]


class _Made:
    """What a pickle asks to be made, by name and arguments, but not made."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args

    def __call__(self, *args: Any) -> "_Made":
        return _Made(self.name, args)

    def __setstate__(self, state: object) -> None:
        """Accept what the pickle would set."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Made(name, ())

    def persistent_load(self, pid: Any) -> Any:
        return pid  # ("storage", class, key, device, number of elements)


def _torch_entry(
    name: str, value: object, places: dict[str, ZipInfo], folder: str, opened: BinaryIO
) -> HeaderEntry | None:
    while isinstance(value, _Made) and value.name == "_rebuild_parameter":
        value = value.args[0]
    if not isinstance(value, _Made) or value.name != "_rebuild_tensor_v2":
        return None
    (_, kind, key, *_), offset, shape, strides = value.args[:4]
    size = _BYTES[kind.name]
    span = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    opened.seek(places[folder + key].header_offset)
    header = opened.read(_ZIP_HEADER)
    lengths = (int.from_bytes(header[place], "little") for place in (_NAME_LENGTH, _EXTRA_LENGTH))
    start = places[folder + key].header_offset + _ZIP_HEADER + sum(lengths)
    return HeaderEntry(name, tuple(shape), kind.name, start + offset * size, span * size, tuple(strides))
