"""Validates constraints before any work is done; errors name the location.

Needs no tokenizer. Most constraints take a millisecond, but a malicious one may take any time or crash the library, so
`StructuredOutputChecker` validates in a process that may die. Errors that only compilation for the model's tokenizer
finds end the request later, with a typed error.
"""

import re
from collections.abc import Iterator

from octavo.errors import InvalidParameterError
from octavo.structured.grammar_text import grammar_text, lark_of, schema_grammar
from octavo.structured.schema import advice, find_excess, locate_fault
from octavo.structured_output import StructuredOutput

MAX_REPEATS = 65_536  # in a regular expression
_REPEAT = re.compile(r"(?<!\\)(?:\\\\)*\{(\d+)(?:,(\d*))?\}")


def check_structured_output(constraint: StructuredOutput) -> None:
    """Raise if no output can satisfy `constraint`.

    Raises:
        InvalidParameterError: names the location of the error.
    """
    for field, what, content in _parts(constraint):
        _CHECKS[what](f"structured_output.{field}", content)
    if constraint.kind in ("choice", "tags") and (error := _validate(grammar_text(constraint, {}))) is not None:
        raise InvalidParameterError(f"structured_output.{constraint.kind}", "...", error)


def _parts(constraint: StructuredOutput) -> Iterator[tuple[str, str, str]]:
    """Yield every text that the user has written: its field, its kind, the text."""
    for name in ("json_schema", "regex", "grammar"):
        if (text := getattr(constraint, name)) is not None:
            yield name, name, str(text)
    for index, tag in enumerate(constraint.tags):
        for name in ("json_schema", "grammar"):
            if (text := getattr(tag, name)) is not None:
                yield f"tags[{index}].{name}", name, str(text)


def _check_schema(field: str, text: str) -> None:
    if (excess := find_excess(text)) is not None:
        raise InvalidParameterError(field, "...", f"at {excess[0]}: {excess[1]}")

    def why_not(schema: str) -> str | None:
        return _validate(schema_grammar(schema))

    if (error := why_not(text)) is not None:
        path, fault = locate_fault(text, error, why_not)
        raise InvalidParameterError(field, "...", f"at {path}: {advice(fault)}")


def _check_regex(field: str, pattern: str) -> None:
    for repeat in _REPEAT.finditer(pattern):
        if max(int(count) for count in repeat.groups(default="0") if count) > MAX_REPEATS:
            raise InvalidParameterError(field, "...", f"at {repeat.start()}: more than {MAX_REPEATS} repeats")
    error = _validate(grammar_text(StructuredOutput(regex=pattern), {}))
    if error is not None:
        raise InvalidParameterError(field, _excerpt(pattern), error)


def _check_grammar(field: str, grammar: str) -> None:
    try:
        error = _validate(lark_of(grammar))
    except ValueError as bad_text:
        error = str(bad_text)
    if error is not None:
        raise InvalidParameterError(field, _excerpt(grammar), error)


def _validate(grammar: str) -> str | None:
    from octavo.structured.llguidance_backend import validate

    return validate(grammar)


def _excerpt(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


_CHECKS = {"json_schema": _check_schema, "regex": _check_regex, "grammar": _check_grammar}
