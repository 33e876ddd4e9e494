"""Finds where a JSON value ends in text that is still arriving, and hands it on meanwhile.

Lenient where models are careless and it does no harm (a line break inside a string), strict where a mistake must not
swallow what follows: brackets match, and outside strings stand only characters that JSON has there.
"""

import json
import re

from octavo.server.openai.parsers.reader import Emit, MalformedError, Steps, TextReader, read_while

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]')
_SCALAR = re.compile(r"[\w.+\-]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Follows one object, array or string to its end. `complete` once that is read, `broken` at what cannot be JSON."""

    __slots__ = ("_awaited", "_escaped", "_in_string", "broken", "complete")

    def __init__(self) -> None:
        self._awaited: list[str] = []  # the brackets that are still to be closed
        self._in_string = False
        self._escaped = False
        self.complete = False
        self.broken = False

    def scan(self, text: str) -> int:
        """Return how many characters of `text`, which goes on where the last one ended, belong to the value."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, position)
            if found is None:
                return len(text)
            self._step(found[0])
            if self.broken:
                return found.start()
            position = found.end()
            if self.complete:
                return position
        return position

    def _step(self, character: str) -> None:
        if self._in_string:
            self._escaped = character == "\\"
            self._in_string = self._escaped
        elif character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._awaited.append(_CLOSING[character])
        elif self._awaited and character == self._awaited[-1]:
            self._awaited.pop()
        else:
            self.broken = True
        self.complete = not (self._awaited or self._in_string or self.broken)


def copy_json(reader: TextReader, emit: Emit) -> Steps[bool]:
    """Hand on the object, array or string that begins here. Returns whether it was whole; if not, what is wrong, or
    the end of the text, comes next."""
    scanner = JsonScanner()
    while True:
        text = reader.rest
        size = scanner.scan(text)
        reader.skip(size)
        emit(text[:size])
        if scanner.complete or scanner.broken or reader.closed:
            return scanner.complete
        yield


def read_json_text(reader: TextReader) -> Steps[str]:
    """Return the text of the value that begins here, of any type.

    Raises:
        MalformedError: when there is none, or it does not end.
    """
    pieces: list[str] = []
    if (yield from reader.peek()) in ('"', "{", "["):
        if not (yield from copy_json(reader, pieces.append)):
            raise MalformedError("value")
        return "".join(pieces)
    scalar = yield from read_while(reader, _SCALAR)
    if not scalar:
        raise MalformedError("value")
    return scalar


def read_string(reader: TextReader) -> Steps[str]:
    """Return the string that the JSON string here stands for.

    Raises:
        MalformedError: when there is no valid one.
    """
    if (yield from reader.peek()) != '"':
        raise MalformedError("string")
    text = yield from read_json_text(reader)
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise MalformedError("string") from error
