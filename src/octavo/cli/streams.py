"""Standard streams in any locale: input is UTF-8, as files are; output never fails for the characters of a model."""

import json
import os
import sys
from io import TextIOWrapper

from octavo.errors import InvalidParameterError

_UTF8 = "utf-8"
_BYTE_ORDER_MARK = "\ufeff"
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by file descriptor


def prepare_streams() -> None:
    """Set the streams of this process. What the encoding of the output lacks is written as backslash escapes.

    Those that the caller has closed read nothing, and discard what is written. Their file descriptors are in use then,
    also in child processes: a socket that got one of them would receive what libraries print.
    """
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            nothing = open(os.devnull, mode, encoding=_UTF8)  # noqa: SIM115
            if nothing.fileno() < len(_STREAMS):
                os.set_inheritable(nothing.fileno(), True)
            setattr(sys, name, nothing)
    if isinstance(sys.stdin, TextIOWrapper) and not sys.stdin.isatty():  # a terminal knows what it sends
        sys.stdin.reconfigure(encoding=_UTF8, errors="surrogateescape")  # see `decoded`
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def decoded(text: str, name: str, *, first_line: int = 1) -> str:
    """Return text of an argument or of standard input, whose undecodable bytes Python kept as lone surrogates. A byte
    order mark before it is no part of it.

    Raises:
        InvalidParameterError: `name`, line and byte of what is not UTF-8.
    """
    data = text.encode(_UTF8, "surrogateescape")
    try:
        return data.decode(_UTF8).removeprefix(_BYTE_ORDER_MARK if first_line == 1 else "")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        byte = error.start - data.rfind(b"\n", 0, error.start)
        value = f"byte {data[error.start]:#04x}"
        raise InvalidParameterError(name, value, f"must be UTF-8; it is not at byte {byte} of line {line}") from error


def print_json_line(line: str) -> None:
    """Print one line of JSON, with escapes where the output is not UTF-8."""
    if (sys.stdout.encoding or _UTF8).lower().replace("-", "") != "utf8":
        line = "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in line)
    print(line)
