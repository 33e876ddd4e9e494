"""Weights in the tensorizer format, from a file or streamed from a web server: read once, from front to back.

A file is `|TZR|`, a version, flags, counts, an index of the tensors, and then each tensor's own header and bytes;
versions 1 to 5 of github.com/coreweave/tensorizer, `tensorizer/serialization.py`. Everything is checked before use.
"""

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

import torch

from octavo.config.checkpoint_files import HeaderEntry
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.gguf.file import HeaderReader
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
_HEADER = struct.Struct("<I32s8x8xQQ")  # version, flags, sizes that readers ignore, number of tensors, bytes of index
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


def read_index(read: Callable[[int], bytes], num_bytes: int, origin: str) -> list[HeaderEntry]:
    """Read the index from the start of a file of `num_bytes`; `read` returns the next bytes. Sorted by offset."""
    reader = HeaderReader(origin, memoryview(read(len(MAGIC) + _HEADER.size)))
    if reader.take(len(MAGIC)) != MAGIC:
        raise CheckpointError(f"{origin}: not a tensorizer file")
    version, flags, count, size = _HEADER.unpack(reader.take(_HEADER.size))
    flags = int.from_bytes(flags, "little")
    if version not in _VERSIONS or flags & ~(_ENCRYPTED | _VERSIONED):
        raise UnsupportedModelError(f"{origin}: version {version} with flags {flags:#x}; supported: versions 1 to 5")
    if version == _ENCRYPTED_VERSION or flags & _ENCRYPTED:
        raise UnsupportedModelError(f"{origin}: encrypted tensors are not supported")
    if size > num_bytes or count * _LEAST_ENTRY_BYTES > size:
        raise CheckpointError(f"{origin}: an index of {size} bytes with {count} tensors cannot be in {num_bytes} bytes")
    reader, is_versioned = HeaderReader(origin, memoryview(read(size))), bool(flags & _VERSIONED)
    entries = (_read_entry(reader, num_bytes, is_versioned=is_versioned) for _ in range(count))
    found = sorted(entries, key=lambda entry: entry.start)
    for first, second in pairwise(found):
        if first.start + first.num_bytes > second.start:
            raise CheckpointError(f"{origin}: tensors {first.name!r} and {second.name!r} overlap")
    if len({entry.name for entry in found}) < len(found):
        raise CheckpointError(f"{origin}: two tensors have the same name")
    return found


def _read_entry(reader: HeaderReader, file_bytes: int, *, is_versioned: bool) -> HeaderEntry:
    size_code = "Q" if is_versioned and reader.number("I") >= _LONG_VERSION else "I"
    name = _text(reader, "H")
    if name.startswith("\x1e"):  # begins a path in nested containers
        raise UnsupportedModelError(f"{reader.origin}: tensors in nested containers are not supported")
    reader.take(1)  # parameter, buffer or entry of a state dict
    numpy_name, _, torch_name = _text(reader, "B").partition("\0")
    dtype = torch_name.removeprefix("torch.") if torch_name else _NUMPY.get(numpy_name, numpy_name)
    if dtype not in _SIZES:
        known = ", ".join(_SIZES)
        raise UnsupportedModelError(f"{reader.origin}: tensor {name!r} has dtype {dtype!r}; supported: {known}")
    num_dimensions = reader.number("B")
    shape = tuple(reader.number(size_code) for _ in range(num_dimensions))
    offset, num_bytes = _LOCATION.unpack(reader.take(_LOCATION.size))
    is_absurd = num_dimensions > 8 or any(size > file_bytes for size in shape) or not name
    if is_absurd or num_bytes != math.prod(shape) * _SIZES[dtype] or offset + num_bytes > file_bytes:
        raise CheckpointError(
            f"{reader.origin}: tensor {name!r} of shape {list(shape)} in {dtype} cannot be the {num_bytes} bytes "
            f"from byte {offset} on of a file of {file_bytes}"
        )
    return HeaderEntry(name, shape, dtype, offset, num_bytes)


def _text(reader: HeaderReader, length_code: str) -> str:
    try:
        return str(reader.take(reader.number(length_code)), "utf-8")
    except UnicodeDecodeError as error:
        raise reader.fail(f"malformed index: {error}") from error


class TensorizerLoader(ModelLoader):
    """Reads `tensorizer_uri`, or `model.tensors` in the model's folder."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is in memory of its own."""
        uri = self.load_config.tensorizer_uri or str(Path(model.config.path) / TENSORIZER_FILE)
        elsewhere = OtherStages(model)
        with _opened(uri) as stream:
            for entry in read_index(stream.read, stream.num_bytes, uri):
                if entry.name not in elsewhere:
                    stream.skip_to(entry.start)
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

    def tensor(self, entry: HeaderEntry) -> torch.Tensor:
        tensor = zeros_on_large_pages(entry.shape, getattr(torch, entry.type))
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
        with urlopen(uri, timeout=60.0) as response:
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise CheckpointError(f"{uri}: the server does not say how long the file is (Content-Length)")
            yield _Stream(response, int(length), uri)
    except (OSError, URLError, HTTPException, ValueError) as error:
        raise CheckpointError(f"{uri}: cannot be read: {error}") from error
