"""The arguments of a call in Python, `(a=1, b="x")`: where they end, and what they are as values of JSON."""

import ast
import json
import re
import warnings

from octavo.server.openai.parsers.reader import MalformedError, Steps, TextReader, read_while

_PLAIN = re.compile(r"[^()\[\]{}\"']*")
_PLAIN_IN_STRING = re.compile(r"[^\\\"']*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES: dict[str, object] = {"true": True, "false": False, "null": None}  # models mix the two languages


def read_parentheses(reader: TextReader) -> Steps[str]:
    """Return the text of the bracketed expression that begins here, brackets included.

    Raises:
        MalformedError: when brackets do not match, or the text ends before.
    """
    pieces: list[str] = []
    awaited: list[str] = []
    while awaited or not pieces:
        pieces.append((yield from read_while(reader, _PLAIN)))
        character = yield from reader.peek()
        if character in ('"', "'"):
            pieces.append((yield from _read_quoted(reader, character)))
            continue
        if character in _CLOSING:
            awaited.append(_CLOSING[character])
        elif not awaited or awaited.pop() != character:
            raise MalformedError("bracket")
        reader.skip(1)
        pieces.append(character)
    return "".join(pieces)


def keyword_arguments(text: str) -> dict[str, object]:
    """Return what `text`, such as `(a=1, b=["x"])`, gives by name, as values that JSON has.

    Raises:
        MalformedError: for anything else, such as arguments without a name or values that are no literals.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # an unknown escape is the model's own affair
            call = ast.parse(f"f{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise MalformedError("argument without a name")
        return {_key(keyword.arg): _argument(f"f{text}", keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError("arguments") from error


def _read_quoted(reader: TextReader, quote: str) -> Steps[str]:
    quote = quote * 3 if (yield from reader.takes(quote * 3)) else quote
    if len(quote) == 1:
        reader.skip(1)
    pieces = [quote]
    while True:
        pieces.append((yield from read_while(reader, _PLAIN_IN_STRING)))
        if (yield from reader.takes(quote)):
            return "".join([*pieces, quote])
        character = yield from _read_character(reader)
        pieces += [character, (yield from _read_character(reader)) if character == "\\" else ""]


def _read_character(reader: TextReader) -> Steps[str]:
    character = yield from reader.peek()
    if not character:
        raise MalformedError("string")
    reader.skip(1)
    return character


def _argument(source: str, node: ast.expr) -> object:
    """Return the value of one argument. Text that is JSON is read as such: the two differ in escapes."""
    try:
        return json.loads(ast.get_source_segment(source, node) or "")
    except ValueError:
        return _value(node)


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_key(_value(key) if key is not None else None) for key in keys]
            return dict(zip(names, map(_value, values), strict=True))
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise MalformedError("value")


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise MalformedError("key")
    return name
