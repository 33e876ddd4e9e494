"""`ResultFile`: the output of an offline batch, a line per result, which a killed program leaves whole."""

import fcntl
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from octavo.errors import InvalidParameterError

_OPENING = b'{"id":"batch_req_'  # of every line


class _Seen(msgspec.Struct):
    """What is read of a result."""

    custom_id: str
    response: dict[str, object] | None = None


class ResultFile:
    """Lines are only added. Locked, so that two programs do not answer the same lines. Close it."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        """Open or create the file, read which of the `known` lines have results, and cut a torn last line.

        Raises InvalidParameterError: it has something else in it, is in use, or cannot be written; it is left as it is.
        """
        self._path, self._known = path, known
        self.num_failed = 0
        self.finished: set[str] = set()  # by custom_id
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._wrong(f"cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self.close()
            raise self._wrong("another program is writing it") from None
        except BaseException:
            self.close()
            raise

    def add(self, custom_id: str, data: bytes, *, is_failed: bool) -> None:
        """Add a result. Raises OSError; what of it was written is cut at the next opening."""
        view = memoryview(data + b"\n")
        while view:
            view = view[os.write(self._descriptor, view) :]
        self.finished.add(custom_id)
        self.num_failed += is_failed

    def close(self) -> None:
        """Sync and close the file."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        decode = msgspec.json.Decoder(_Seen).decode
        num_whole_bytes = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.startswith(_OPENING[: len(line)]):
                    raise self._wrong(f"line {number} is not a result of a batch: choose another file")
                if not line.endswith(b"\n"):  # only the last can be
                    break
                try:
                    seen = decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise self._wrong(f"line {number} is not a result of a batch: {error}") from error
                if seen.custom_id not in self._known:
                    raise self._wrong(f"has a result of another input, {seen.custom_id[:64]!r}: choose another file")
                self.finished.add(seen.custom_id)
                self.num_failed += seen.response is None or seen.response.get("status_code") != 200
                num_whole_bytes += len(line)
        os.ftruncate(self._descriptor, num_whole_bytes)

    def _wrong(self, limit: str) -> InvalidParameterError:
        return InvalidParameterError("output", str(self._path), limit)
