"""From a request's bytes to its wire type. Whatever is wrong with them is a 400 that names the field."""

import re
from typing import TypeVar

import msgspec

from octavo.server.errors import ApiError, bad_request

MAX_DEPTH = 128  # lists and objects inside one another
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_WORDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "an array",
          "object": "an object", "null": "null"}  # fmt: skip

T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
    """Return a request.

    Raises:
        ApiError: 400; malformed JSON, too many levels of it, a field that is missing or has another type.
    """
    if _is_too_deep(body):
        raise bad_request(f"The request's JSON is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request's body is not valid JSON: {error}", code="invalid_json") from error


def _is_too_deep(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:  # nearly always
        return False
    depth = 0
    for match in _STRUCTURE.finditer(body):
        mark = match[0]
        if mark in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif mark in (b"]", b"}"):
            depth -= 1
    return False


def _type_error(text: str) -> ApiError:
    """Put msgspec's words into those of the API: "Expected `int | null`, got `str` - at `$.n`"."""
    found = _WRONG.fullmatch(text)
    assert found is not None
    what, path = found["what"], (found["path"] or "").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        param = f"{path}.{missing[1]}".lstrip(".")
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    what = re.sub(r"`([^`]*)`", lambda quoted: _in_words(quoted[1]), what)
    where = f"Invalid type for '{path}'" if path else "Invalid request body"
    return bad_request(f"{where}: {what[:1].lower()}{what[1:]}.", path or None, "invalid_type")


def _in_words(types: str) -> str:
    names = [_WORDS.get(name, name) for name in types.split(" | ")]
    return " or ".join(name for name in names if name != "null" or len(names) == 1)
