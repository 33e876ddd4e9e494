"""`receive_upload`: a form with one file (multipart/form-data), written to disk as it arrives."""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from starlette.types import Receive

from octavo.errors import StateError
from octavo.server.http.errors import ApiError, bad_request

_PIECE_BYTES = 2**20  # parsed and written at a time, in a thread
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_MAX_NAME_CHARACTERS = 255


@dataclass(slots=True)
class Upload:
    """A form that has arrived: its fields, and the size and name of its file, which is on disk."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    num_bytes: int = 0


async def receive_upload(receive: Receive, content_type: bytes, path: Path, max_bytes: int) -> Upload | None:
    """Receive a form whose field `file` goes to `path`, a new file, synced; None if the client left before its end.

    Raises ApiError: 415 for another content type, 400 for a form that is malformed or has no file, 413 for a file of
    more than `max_bytes`. StateError: it cannot be written. Whatever happened, `path` may exist.
    """
    parser = _FormParser(content_type, path, max_bytes)
    try:
        pieces: list[bytes] = []
        num_waiting, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            num_waiting += len(pieces[-1])
            has_more = message.get("more_body", False)
            if num_waiting >= _PIECE_BYTES or not has_more:
                await asyncio.to_thread(parser.push, b"".join(pieces))
                pieces, num_waiting = [], 0
        return await asyncio.to_thread(parser.finish)
    finally:
        parser.close()


class _FormParser:
    """Takes the body piece by piece. Fields are kept in memory, within limits; the file is written."""

    def __init__(self, content_type: bytes, path: Path, max_bytes: int) -> None:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data":
            message = f"Content-Type must be multipart/form-data, not {content_type[:100].decode('latin-1')!r}."
            raise ApiError(415, message, code="unsupported_media_type")
        if not boundary:
            raise _malformed("its Content-Type names no boundary")
        self._parse_options, self._form_error = parse_options_header, FormParserError
        self._path, self._max_bytes = path, max_bytes
        self._upload = Upload()
        self._file: BinaryIO | None = None
        self._header_name, self._header_value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._field_name: str | None = None  # of the part that is read; None: it is the file
        self._field_value = bytearray()
        self._num_fields = 0
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _malformed(str(error)) from error

    def push(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except OSError as error:
            raise StateError(f"the file cannot be written: {error}") from error
        except self._form_error as error:
            raise _malformed(str(error)) from error

    def finish(self) -> Upload:
        if not self._has_ended:
            raise _malformed("it ends before its last boundary")
        if self._file is None:
            raise bad_request("Missing required parameter: 'file'.", "file", "missing_required_parameter")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StateError(f"the file cannot be written: {error}") from error
        return self._upload

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin_part(self) -> None:
        self._headers = {}
        self._field_value.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = self._parse_options(self._headers.get(b"content-disposition", b""))
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise _malformed("a part has no name")
        if name != b"file":
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                raise _malformed(f"more than {_MAX_FIELDS} fields")
            self._field_name = name.decode("utf-8", "replace")
            return
        if filename is None:
            raise bad_request("'file' must be a file with a name, not a text.", "file")
        if self._file is not None:
            raise bad_request("One file at a time: 'file' was given twice.", "file")
        self._field_name = None
        self._upload.filename = filename.decode("utf-8", "replace")[-_MAX_NAME_CHARACTERS:]
        self._file = create_private(self._path)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field_name is not None:
            self._field_value += data[start:end]
            if len(self._field_value) > _MAX_FIELD_BYTES:
                raise bad_request(f"At most {_MAX_FIELD_BYTES} bytes.", self._field_name[:100])
            return
        assert self._file is not None
        self._upload.num_bytes += end - start
        if self._upload.num_bytes > self._max_bytes:
            message = f"The file is larger than {self._max_bytes} bytes (the server's --max-file-bytes)."
            raise ApiError(413, message, param="file", code="file_too_large")
        write_all(self._file, memoryview(data)[start:end])

    def _end_part(self) -> None:
        if self._field_name is not None:
            self._upload.fields[self._field_name] = self._field_value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True


def create_private(path: Path) -> BinaryIO:
    """Open a new file that only its owner may read, unbuffered. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb", buffering=0)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _malformed(why: str) -> ApiError:
    return bad_request(f"The form is not valid multipart/form-data: {why}.", code="invalid_multipart")
