"""Weights in the tensorizer format, from a file or streamed from a web server: read once, from front to back."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

import torch

from octavo.errors import CheckpointError
from octavo.kernels.large_pages import zeros_on_large_pages
from octavo.loader.base import ModelLoader
from octavo.loader.tensorizer_index import IndexEntry, read_index
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages

FILE_NAME = "model.tensors"
_SILENCE_S = 60.0  # of a server, until reading is given up
_SKIPPED_AT_ONCE = 1 << 20


class TensorizerLoader(ModelLoader):
    """Reads `tensorizer_uri`, or `model.tensors` in the model's folder."""

    def tensors(self, model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ModelLoader.tensors`. Each tensor is in memory of its own.

        Raises:
            CheckpointError: no such file or address, or it is truncated or malformed.
            UnsupportedModelError: it is encrypted, or of an unknown version.
        """
        uri = self.load_config.tensorizer_uri or str(Path(model.config.path) / FILE_NAME)
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
            if not self.read(min(offset - self._position, _SKIPPED_AT_ONCE)):
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
