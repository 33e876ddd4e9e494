"""Reads integers that a client writes as floats, `16.0`: languages with one type of numbers send them so."""

import re
from typing import Any, TypeVar

import msgspec

_MOST_FIELDS = 32  # that one request can have so
_EXPECTS_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$(?P<path>.*)`", re.DOTALL)
_LARGEST = 2**53  # beyond it a float stands for many integers
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")

T = TypeVar("T")


def decode_with_whole_numbers(body: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    """Return a request that is valid once floats without a fraction are integers where only integers may be.

    Raises:
        ValidationError: `error`, which says what is wrong with the body, or what is wrong besides.
    """
    value = msgspec.json.decode(body)
    for _ in range(_MOST_FIELDS):
        found = _EXPECTS_INTEGER.fullmatch(str(error))
        if found is None or not _make_whole(value, found["path"]):
            break
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as next_error:
            error = next_error
    raise error


def _make_whole(value: Any, path: str) -> bool:
    """Replace the float at `path`, and its neighbors in a list; return whether it is an integer."""
    steps: list[Any] = [name or int(index) for name, index in _STEP.findall(path)]
    for step in steps[:-1]:
        value = value[step]
    last = steps[-1]
    if not _is_whole(value[last]):
        return False
    if isinstance(value, list):
        value[:] = [int(each) if _is_whole(each) else each for each in value]
    else:
        value[last] = int(value[last])
    return True


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST
