"""`GgufFile`: the metadata of a GGUF file, and the location of its tensors; split files are read as one.

Versions 2 and 3, little-endian. Every size and value is checked before use: a damaged file is a `CheckpointError`.
"""

import math
import mmap
import re
import struct
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.gguf.types import MAGIC, READ_TYPES, UNREAD_TYPES, GgmlType

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 13, 33  # minimum size of a header entry, with an empty name
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# enum gguf_metadata_value_type
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_STRING_BYTES = 8
_MAX_NAME_BYTES = 65_535  # limit for keys by the specification; tensor names are shorter still


class HeaderReader:
    """A position in the bytes of a file.

    Every method raises `CheckpointError`, with the position, if the file is truncated or a value is invalid.
    """

    def __init__(self, origin: str, data: memoryview) -> None:
        self.origin, self._data, self.position = origin, data, 0

    def fail(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: byte {self.position}: {why}")

    def take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self._data):
            raise self.fail(f"the file ends at byte {len(self._data)}, {num_bytes} more bytes are expected here")
        taken, self.position = self._data[self.position : end], end
        return taken

    def number(self, code: str) -> Any:
        """Return a number; `code` is its `struct` format character, little-endian."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Return a count of items of at least `least_bytes` each, which must fit into the rest of the file."""
        count: int = self.number("Q")
        if count * least_bytes > len(self._data) - self.position:
            raise self.fail(f"{count} {what} cannot be in the rest of the file")
        return count

    def text(self) -> str:
        taken = self.take(self.count("bytes", 1))
        try:
            return str(taken, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"not UTF-8: {error}") from error

    def name(self) -> str:
        name = self.text()
        if not name or len(name) > _MAX_NAME_BYTES or not name.isprintable():
            raise self.fail(f"{name[:80]!r} is not a name")
        return name

    def value(self) -> Any:
        """Return a value of any type, preceded by its type; an array becomes a list, one of strings a `TextArray`."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._one(kind)()
        item = self.number("I")
        if item in _NUMBERS:
            code = _NUMBERS[item]
            size = struct.calcsize("<" + code)
            count = self.count("numbers", size)
            return list(struct.unpack(f"<{count}{code}", self.take(count * size)))
        if item == _STRING:
            return self._skip_texts(self.count("strings", _LEAST_STRING_BYTES))
        one = self._one(item)
        return [one() for _ in range(self.count("values", 1))]

    def _skip_texts(self, count: int) -> "TextArray":
        """Skip so many strings; fast, as a vocabulary has hundreds of thousands of tokens and merges."""
        data, begin, position, size_at = self._data, self.position, self.position, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += _LEAST_STRING_BYTES + size_at(data, position)[0]
        except (struct.error, OverflowError) as error:
            raise self.fail(f"a string in this array is cut off: {error}") from error
        if position > len(data):
            raise self.fail(f"a string that ends at byte {position} cannot be in a file of {len(data)}")
        self.position = position
        return TextArray(self.origin, data, begin, count)

    def _one(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self.text
        if kind == _BOOL:
            return self._flag
        if kind in _NUMBERS:
            return partial(self.number, _NUMBERS[kind])
        raise self.fail(f"{kind} is not the type of a value (arrays of arrays are not read)")

    def _flag(self) -> bool:
        value = self.number("B")
        if value > 1:
            raise self.fail(f"{value} is neither true (1) nor false (0)")
        return bool(value)


@dataclass(frozen=True, slots=True)
class TextArray:
    """Strings in a file, not decoded yet: a start reads the file three times, and only one reader needs them."""

    origin: str
    data: memoryview
    begin: int
    count: int

    def decoded(self) -> list[str]:
        texts: list[str] = []
        for begin, end in self._places():
            try:
                texts.append(str(self.data[begin:end], "utf-8"))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.origin}: byte {end}: a string is not UTF-8: {error}") from error
        return texts

    def indices_of(self, texts: Sequence[str]) -> list[int]:
        wanted = {text.encode() for text in texts}
        sizes, data = {len(text) for text in wanted}, self.data
        return [
            index
            for index, (begin, end) in enumerate(self._places())
            if end - begin in sizes and bytes(data[begin:end]) in wanted
        ]

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield where each string begins and ends; all of that is in the file."""
        data, end, size_at = self.data, self.begin, struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            begin = end + _LEAST_STRING_BYTES
            end = begin + size_at(data, end)[0]
            yield begin, end


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a mapped file."""

    name: str
    shape: tuple[int, ...]  # row-major, as in torch; the file stores it reversed
    type: GgmlType
    data: npt.NDArray[np.uint8]  # [rows..., bytes per row], a read-only view of the file


class Metadata(UserDict[str, Any]):
    """Values by key; strings of an array are decoded on first access."""

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if isinstance(value, TextArray):
            value = self.data[key] = value.decoded()
        return value

    def indices_of(self, key: str, texts: Sequence[str]) -> list[int]:
        """Return where some texts are in an array of strings, without decoding it; empty if there is no such array."""
        value = self.data.get(key)
        if isinstance(value, TextArray):
            return value.indices_of(texts)
        return [index for index, text in enumerate(value) if text in texts] if isinstance(value, list) else []


class GgufFile:
    """One file, or the parts of a split one."""

    def __init__(
        self,
        paths: Sequence[Path],
        metadata: Metadata,
        tensors: Mapping[str, GgufTensor],
        mappings: Sequence[mmap.mmap],
    ) -> None:
        self.paths, self.metadata, self.tensors, self._mappings = paths, metadata, tensors, mappings
        self.path = paths[0]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Map a file; given the first part of a split one, map all parts."""
        first = _map(path)
        metadata, tensors = _read_part(path, first)
        mappings, paths = [first], [path]
        for other in _other_parts(path, metadata.get("split.count", 1), metadata.get("split.no", 0)):
            paths.append(other)
            mappings.append(_map(other))
            for name, tensor in _read_part(other, mappings[-1])[1].items():
                if name in tensors:
                    raise CheckpointError(f"{other}: tensor {name!r} is also in another part")
                tensors[name] = tensor
        expected = metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise CheckpointError(f"{path}: the parts have {len(tensors)} tensors, split.tensors.count={expected!r}")
        return cls(paths, metadata, tensors, mappings)

    def release_pages(self) -> None:
        """Unmap what has been read, which counts as this process's memory; further reads map it again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapping in self._mappings:
                mapping.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(f"{self.path}: general.architecture={found!r}: a name is expected")
        return found


def _other_parts(path: Path, count: object, number: object) -> Iterator[Path]:
    """Yield the paths of the parts after the first. The names are derived, never taken from the file."""
    if count in (0, 1):
        return
    found = _PART.fullmatch(path.name)
    if found is None or count != int(found["count"]):
        raise CheckpointError(f"{path}: one of {count!r} parts, but not named NAME-00001-of-{count!s:0>5}.gguf")
    if number != 0 or found["number"] != "00001":
        raise CheckpointError(f"{path}: not the first part; load {found['stem']}-00001-of-{found['count']}.gguf")
    for index in range(2, int(found["count"]) + 1):
        yield path.with_name(f"{found['stem']}-{index:05}-of-{found['count']}.gguf")


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns about read-only arrays
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise CheckpointError(f"{path}: cannot be mapped: {error}") from error


def _read_part(path: Path, mapped: mmap.mmap) -> tuple[Metadata, dict[str, GgufTensor]]:
    data = memoryview(mapped)
    reader = HeaderReader(str(path), data)
    if reader.take(len(MAGIC)) != MAGIC:
        raise CheckpointError(f"{reader.origin}: not a GGUF file")
    version = reader.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "big-endian" if swapped in _VERSIONS else f"version {version}"
        raise UnsupportedModelError(f"{reader.origin}: {why}; versions 2 and 3, little-endian, are supported")
    num_tensors = reader.count("tensors", _LEAST_TENSOR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(reader.count("keys", _LEAST_KEY_BYTES)):
        if (key := reader.name()) in metadata:
            raise reader.fail(f"{key!r} is given twice")
        metadata[key] = reader.value()
    tensors = _read_tensors(reader, data, num_tensors, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    return Metadata(metadata), tensors


def _read_tensors(reader: HeaderReader, data: memoryview, count: int, alignment: object) -> dict[str, GgufTensor]:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise reader.fail(f"general.alignment={alignment!r}: a power of two is expected")
    entries = [_read_entry(reader) for _ in range(count)]
    begin = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{reader.origin}: tensor {name!r} is given twice")
        row_bytes = kind.row_bytes(shape[-1])
        start, num_bytes = begin + offset, math.prod(shape[:-1]) * row_bytes
        if offset % alignment or start + num_bytes > len(data):
            where = f"outside a file of {len(data)} bytes or not at a multiple of {alignment}"
            raise CheckpointError(
                f"{reader.origin}: tensor {name!r} lies at bytes {start} to {start + num_bytes}, {where}"
            )
        view = np.frombuffer(data, np.uint8, num_bytes, start).reshape(*shape[:-1], row_bytes)
        tensors[name] = GgufTensor(name, shape, kind, view)
    return tensors


def _read_entry(reader: HeaderReader) -> tuple[str, tuple[int, ...], GgmlType, int]:
    """Return a tensor's name, shape and type, and its offset in bytes from the start of the data."""
    name, num_dimensions = reader.name(), reader.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.fail(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are expected")
    shape = tuple(reader.number("Q") for _ in range(num_dimensions))[::-1]
    kind, offset = reader.number("I"), reader.number("Q")
    if kind not in READ_TYPES:
        known = ", ".join(each.name for each in READ_TYPES.values())
        what = UNREAD_TYPES.get(kind, str(kind))
        raise UnsupportedModelError(f"{reader.origin}: tensor {name!r} is of type {what}; supported: {known}")
    if not all(0 < size < 1 << 40 for size in shape) or shape[-1] % READ_TYPES[kind].block_size:
        raise reader.fail(f"tensor {name!r} of type {READ_TYPES[kind].name} cannot be of shape {shape}")
    return name, shape, READ_TYPES[kind], offset
