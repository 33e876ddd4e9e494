"""The header of a safetensors file: which tensors it has, and where. Nothing is loaded, so neither torch nor NumPy."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.errors import CheckpointError

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
class HeaderEntry:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int  # of its values, in the file
    num_bytes: int


def read_header(file: Path) -> Iterator[HeaderEntry]:
    """Yield the tensors of one safetensors file.

    Raises:
        CheckpointError: missing, truncated or malformed.
    """
    text, num_bytes = _header(file)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed header: {error!r}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: malformed header: an object is expected")
    entries.pop(_METADATA, None)
    for name, entry in entries.items():
        yield _checked(file, name, entry, _LENGTH_BYTES + len(text), num_bytes)
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
