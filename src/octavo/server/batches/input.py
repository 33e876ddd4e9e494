"""Checks the input of a batch: JSON lines of `custom_id`, `method`, `url` and `body`, in OpenAI's format."""

import codecs
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.server.batches.protocol import BatchLine, LineError

MAX_ERRORS = 100  # that are listed; the rest is counted
_MAX_ID_CHARACTERS = 512


class InputLine(NamedTuple):
    """Where a line is in its file."""

    line: int  # from 0, blank ones counted
    custom_id: str
    start: int  # in bytes
    num_bytes: int


class _Peek(msgspec.Struct):
    """What a batch must know of a body."""

    stream: object = None


_read_line = msgspec.json.Decoder(BatchLine).decode
_read_body = msgspec.json.Decoder(_Peek).decode


def read_line(data: bytes) -> BatchLine:
    """Return a line that `check_input` has accepted. Raises msgspec.MsgspecError: the file has changed since."""
    return _read_line(data)


def check_input(
    path: Path, endpoints: Collection[str], *, max_lines: int, max_line_bytes: int
) -> tuple[list[InputLine], list[LineError]]:
    """Return all lines but blank ones, and what is wrong with them, at most `MAX_ERRORS`. Raises OSError."""
    lines: list[InputLine] = []
    errors: list[LineError] = []
    first_uses: dict[str, int] = {}
    start = 0
    with path.open("rb") as file:
        if file.read(3) == codecs.BOM_UTF8:
            start = 3
        file.seek(start)
        for number, data in enumerate(file):
            if data.strip():
                if len(lines) >= max_lines:
                    message = f"The file has more than {max_lines} lines."
                    errors.append(LineError(code="too_many_lines", message=message, line=number + 1))
                    break
                try:
                    checked = _checked(data, endpoints, max_line_bytes)
                    first = first_uses.setdefault(checked, number + 1)
                    if first != number + 1:
                        message = f"The custom_id {checked[:64]!r} is that of line {first}, too."
                        raise _WrongLineError("duplicate_custom_id", message, "custom_id")
                except _WrongLineError as error:
                    errors.append(LineError(code=error.code, message=str(error), param=error.param, line=number + 1))
                    if len(errors) >= MAX_ERRORS:
                        break
                else:
                    lines.append(InputLine(number, checked, start, len(data)))
            start += len(data)
    if not lines and not errors:
        errors.append(LineError(code="empty_file", message="The file has no lines."))
    return lines, errors


class _WrongLineError(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def _checked(data: bytes, endpoints: Collection[str], max_bytes: int) -> str:
    """Return the line's `custom_id`. Raises _WrongLineError."""
    if len(data) > max_bytes:
        raise _WrongLineError("line_too_large", f"The line is larger than {max_bytes} bytes.")
    try:
        line = _read_line(data)
    except msgspec.ValidationError as error:
        raise _WrongLineError("invalid_type", f"The line is not a request: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _WrongLineError("invalid_json_line", f"The line is not valid JSON: {error}.") from error
    if missing := [name for name in line.__struct_fields__ if getattr(line, name) is msgspec.UNSET]:
        message = f"Missing required parameter: '{missing[0]}'."
        raise _WrongLineError("missing_required_parameter", message, missing[0])
    custom_id, method, url, body = line.custom_id, line.method, line.url, line.body
    assert isinstance(custom_id, str)
    assert isinstance(body, msgspec.Raw)
    if not 0 < len(custom_id) <= _MAX_ID_CHARACTERS:
        raise _WrongLineError("invalid_custom_id", f"custom_id has 1 to {_MAX_ID_CHARACTERS} characters.", "custom_id")
    if method != "POST":
        raise _WrongLineError("invalid_method", f"method={str(method)[:64]!r}: must be 'POST'.", "method")
    if url not in endpoints:
        known = " or ".join(repr(endpoint) for endpoint in endpoints)
        raise _WrongLineError("invalid_url", f"url={str(url)[:64]!r}: must be {known}.", "url")
    try:
        is_stream = _read_body(body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _WrongLineError("invalid_type", f"'body' is not a request: {error}.", "body") from error
    if is_stream:
        raise _WrongLineError("unsupported_parameter", "'stream' has no place in a batch.", "body.stream")
    return custom_id


class LineReader:
    """Reads lines of a file by their places. Close it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, line: InputLine) -> bytes:
        """Raises OSError."""
        return os.pread(self._descriptor, line.num_bytes, line.start)

    def close(self) -> None:
        os.close(self._descriptor)
