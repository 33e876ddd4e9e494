"""Reads the values of a GGUF header sequentially from a mapped file. Every size is checked before use."""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.errors import CheckpointError

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
        """Return the next bytes."""
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
        """Return a string."""
        taken = self.take(self.count("bytes", 1))
        try:
            return str(taken, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"not UTF-8: {error}") from error

    def name(self) -> str:
        """Return the name of a key or tensor."""
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
        """Return the strings.

        Raises:
            CheckpointError: not UTF-8.
        """
        texts: list[str] = []
        for begin, end in self._places():
            try:
                texts.append(str(self.data[begin:end], "utf-8"))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.origin}: byte {end}: a string is not UTF-8: {error}") from error
        return texts

    def indices_of(self, texts: Sequence[str]) -> list[int]:
        """Return where these are."""
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


# enum gguf_metadata_value_type
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_STRING_BYTES = 8
