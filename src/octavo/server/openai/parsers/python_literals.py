"""Values as Python writes them, which models mix with JSON, as values of JSON."""

import ast
import warnings

from octavo.server.openai.parsers.reader import MalformedError

_JSON_NAMES: dict[str, object] = {"true": True, "false": False, "null": None}


def literal_value(text: str) -> object:
    """Return the value of a text such as `{'a': [True, None]}`.

    Raises:
        MalformedError: it is anything else, such as a name or a sum.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # models write unknown escapes
            return value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError("value") from error


def value_of(node: ast.expr) -> object:
    """Return the value of a literal. Raises MalformedError for any other expression."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key_of(value_of(key) if key is not None else None) for key in keys]
            return dict(zip(names, map(value_of, values), strict=True))
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise MalformedError("value")


def key_of(name: object) -> str:
    """Return the name of a key. Raises MalformedError for what is no text."""
    if not isinstance(name, str):
        raise MalformedError("key")
    return name
