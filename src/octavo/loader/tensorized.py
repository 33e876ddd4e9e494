"""Weights in the tensorizer format, from a file or streamed from a web server: read once, from front to back.

A file is `|TZR|`, a version, flags, counts, an index of the tensors, and then each tensor's own header and bytes;
versions 1 to 5 of github.com/coreweave/tensorizer, `tensorizer/serialization.py`. Everything is checked before use.
"""

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

import torch

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.kernels.large_pages import zeros_on_large_pages
from octavo.loader.base import ModelLoader
from octavo.loader.index import TENSORIZER_FILE
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages

MAGIC = b"|TZR|"
_VERSIONS = (1, 2, 3, 4, 5)
_ENCRYPTED_VERSION = 3
_ENCRYPTED, _VERSIONED = 1, 2  # flags
_LONG_VERSION = 5  # of an entry, whose sizes take 8 bytes each
_HEADER = struct.Struct("<I32s8x8xQ")  # version, flags, sizes that readers ignore, number of tensors
_LOCATION = struct.Struct("<8xQQ")  # offset of the tensor's header, which repeats the entry; of its bytes; their size
_LEAST_ENTRY_BYTES = 2 + 1 + 1 + 1 + 24
_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_NUMPY = {
    "<f8": "float64", "<f4": "float32", "<f2": "float16", "<i8": "int64", "<i4": "int32", "<i2": "int16", "|i1": "int8",
    "|u1": "uint8", "|b1": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One tensor."""

    name: str
    dtype: str  # as torch calls it
    shape: tuple[int, ...]
    offset: int  # of its bytes, from the start of the file
    num_bytes: int


def read_index(read: Callable[[int], bytes], num_bytes: int, origin: str) -> list[IndexEntry]:
    """Read the index from the start of a file of `num_bytes`; `read` returns the next bytes. Sorted by offset."""

    def take(count: int, what: str) -> bytes:
        found = read(count)
        if len(found) < count:
            raise CheckpointError(f"{origin}: the file ends inside {what}")
        return found

    if take(len(MAGIC), "its magic number") != MAGIC:
        raise CheckpointError(f"{origin}: not a tensorizer file")
    version, flags, count = _HEADER.unpack(take(_HEADER.size, "its header"))
    flags = int.from_bytes(flags, "little")
    if version not in _VERSIONS or flags & ~(_ENCRYPTED | _VERSIONED):
        raise UnsupportedModelError(f"{origin}: version {version} with flags {flags:#x}; supported: versions 1 to 5")
    if version == _ENCRYPTED_VERSION or flags & _ENCRYPTED:
        raise UnsupportedModelError(f"{origin}: encrypted tensors are not supported")
    (size,) = struct.unpack("<Q", take(8, "its header"))
    if size > num_bytes or count * _LEAST_ENTRY_BYTES > size:
        raise CheckpointError(f"{origin}: an index of {size} bytes with {count} tensors cannot be in {num_bytes} bytes")
    entries = _Entries(origin, take(size, "its index"), num_bytes)
    found = sorted(entries.read(count, is_versioned=bool(flags & _VERSIONED)), key=lambda entry: entry.offset)
    for first, second in pairwise(found):
        if first.offset + first.num_bytes > second.offset:
            raise CheckpointError(f"{origin}: tensors {first.name!r} and {second.name!r} overlap")
    if len({entry.name for entry in found}) < len(found):
        raise CheckpointError(f"{origin}: two tensors have the same name")
    return found


class _Entries:
    """A position in the bytes of an index."""

    def __init__(self, origin: str, data: bytes, file_bytes: int) -> None:
        self._origin, self._data, self._file_bytes, self._position = origin, data, file_bytes, 0

    def read(self, count: int, *, is_versioned: bool) -> Iterator[IndexEntry]:
        try:
            for _ in range(count):
                is_long = is_versioned and self._number("I") >= _LONG_VERSION
                yield self._one("Q" if is_long else "I")
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self._origin}: malformed index at byte {self._position}: {error}") from error

    def _one(self, size_code: str) -> IndexEntry:
        raw_name = self._bytes("H")
        if raw_name[:1] == b"\x1e":  # begins a path in nested containers
            raise UnsupportedModelError(f"{self._origin}: tensors in nested containers are not supported")
        name = raw_name.decode()
        self._number("B")  # parameter, buffer or entry of a state dict
        dtype = self._dtype(name, self._bytes("B").decode())
        num_dimensions = self._number("B")
        shape = tuple(self._number(size_code) for _ in range(num_dimensions))
        offset, num_bytes = _LOCATION.unpack_from(self._data, self._position)
        self._position += _LOCATION.size
        is_absurd = num_dimensions > 8 or any(size > self._file_bytes for size in shape) or not name
        if is_absurd or num_bytes != math.prod(shape) * _SIZES[dtype] or offset + num_bytes > self._file_bytes:
            raise CheckpointError(
                f"{self._origin}: tensor {name!r} of shape {list(shape)} in {dtype} cannot be the {num_bytes} bytes "
                f"from byte {offset} on of a file of {self._file_bytes}"
            )
        return IndexEntry(name, dtype, shape, offset, num_bytes)

    def _dtype(self, name: str, written: str) -> str:
        numpy_name, _, torch_name = written.partition("\0")
        dtype = torch_name.removeprefix("torch.") if torch_name else _NUMPY.get(numpy_name, numpy_name)
        if dtype not in _SIZES:
            known = ", ".join(_SIZES)
            raise UnsupportedModelError(f"{self._origin}: tensor {name!r} has dtype {dtype!r}; supported: {known}")
        return dtype

    def _number(self, code: str) -> int:
        (number,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return int(number)

    def _bytes(self, length_code: str) -> bytes:
        length = self._number(length_code)
        taken = self._data[self._position : self._position + length]
        self._position += length
        return taken


_SILENCE_S = 60.0  # of a server, until reading is given up


class TensorizerLoader(ModelLoader):
    """Reads `tensorizer_uri`, or `model.tensors` in the model's folder."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is in memory of its own."""
        uri = self.load_config.tensorizer_uri or str(Path(model.config.path) / TENSORIZER_FILE)
        elsewhere = OtherStages(model)
        with _opened(uri) as stream:
            for entry in read_index(stream.read, stream.num_bytes, uri):
                if entry.name not in elsewhere:
                    stream.skip_to(entry.offset)
                    yield entry.name, stream.tensor(entry)


class _Stream:
    """Bytes that are read from front to back."""

    def __init__(self, source: IO[bytes], num_bytes: int, origin: str) -> None:
        self._source, self.num_bytes, self._origin, self._position = source, num_bytes, origin, 0

    def read(self, num_bytes: int) -> bytes:
        found = self._source.read(num_bytes)
        self._position += len(found)
        return found

    def skip_to(self, offset: int) -> None:
        if self._source.seekable():
            self._source.seek(offset)
            self._position = offset
        while self._position < offset:
            if not self.read(min(offset - self._position, 1 << 20)):
                raise self._ended()

    def tensor(self, entry: IndexEntry) -> torch.Tensor:
        tensor = zeros_on_large_pages(entry.shape, getattr(torch, entry.dtype))
        if not entry.num_bytes:
            return tensor
        rest = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
        while rest:
            count = self._source.readinto(rest)  # type: ignore[attr-defined]  # files and responses have it
            if not count:
                raise self._ended()
            self._position += count
            rest = rest[count:]
        return tensor

    def _ended(self) -> CheckpointError:
        return CheckpointError(f"{self._origin}: ended after {self._position} of {self.num_bytes} bytes")


@contextmanager
def _opened(uri: str) -> Iterator[_Stream]:
    """Open a file or an address."""
    try:
        if not uri.startswith(("http://", "https://")):
            with Path(uri).open("rb", buffering=0) as file:
                yield _Stream(file, Path(uri).stat().st_size, uri)
            return
        with urlopen(uri, timeout=_SILENCE_S) as response:
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise CheckpointError(f"{uri}: the server does not say how long the file is (Content-Length)")
            yield _Stream(response, int(length), uri)
    except (OSError, URLError, HTTPException, ValueError) as error:
        raise CheckpointError(f"{uri}: cannot be read: {error}") from error
