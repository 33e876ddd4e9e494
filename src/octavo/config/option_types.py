"""Options as dataclass fields with help texts, checked against their annotations and limits."""

import math
from collections.abc import Callable
from dataclasses import field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from octavo.errors import InvalidParameterError

# What an error says, and whether it holds; comparisons with NaN are false.
Limit = tuple[str, Callable[[Any], bool]]
COUNT: Limit = ("an integer of at least 1", lambda value: value >= 1)
POSITIVE: Limit = ("greater than 0", lambda value: value > 0.0)
POSITIVE_FINITE: Limit = ("a finite number greater than 0", lambda value: 0.0 < value < math.inf)
FRACTION: Limit = ("greater than 0 and at most 1", lambda value: 0.0 < value <= 1.0)
AMOUNT: Limit = ("a finite number of at least 0", lambda value: 0.0 <= value < math.inf)

_KINDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "a mapping"}


def option(
    default: Any, help_text: str, limit: Limit | None = None, *, is_secret: bool = False, also: str | None = None
) -> Any:
    """A dataclass field with the help text of its command-line flag; secret ones are never printed.

    `also` is another spelling of the flag, that of other programs.
    """
    return field(default=default, metadata={"help": help_text, "limit": limit, "is_secret": is_secret, "also": also})


def check_options(options: Any) -> None:
    """Check every option of a dataclass against its annotation and its limit; None, where allowed, has no limit.

    Raises InvalidParameterError: names the option, its value and the allowed values.
    """
    for spec in fields(options):
        value, limit = getattr(options, spec.name), spec.metadata["limit"]
        _check_type(spec.name, spec.type, value)
        if limit is not None and value is not None and not limit[1](value):
            raise InvalidParameterError(spec.name, value, limit[0])


def _check_type(name: str, annotation: Any, value: object) -> None:
    """Check a value against an annotation: a Literal, a tuple of strings, or plain types of which one may be None."""
    allowed = get_args(annotation) or (annotation,)
    if get_origin(allowed[0]) is Literal:
        allowed = get_args(allowed[0]) if value is not None else (NoneType,)
    if get_origin(annotation) is tuple:
        if not (isinstance(value, tuple) and all(type(item) is str for item in value)):
            raise InvalidParameterError(name, value, "must be a list of strings")
    elif isinstance(allowed[0], str):
        if value not in allowed:
            raise InvalidParameterError(name, value, "one of " + ", ".join(allowed))
    else:
        kinds = [get_origin(kind) or kind for kind in allowed]
        if type(value) not in kinds and not (type(value) is int and float in kinds):  # exact: True is not an int
            what = " or ".join(_KINDS[kind] for kind in kinds if kind is not NoneType)
            raise InvalidParameterError(name, value, f"must be {what}")
