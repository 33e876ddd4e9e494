"""Finds the fields of a request that have no effect, so that a misspelled one does not go unnoticed.

They are no errors: official clients send more fields with every version.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from octavo.server.openai.protocol import ResponseFormat, StructuredOutputs

# For a provider's own use, or without an effect on the answer: every request may carry them.
_WITHOUT_EFFECT = frozenset(
    (
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction",
    )
)  # fmt: skip
_REPLACED = {"functions": "tools", "function_call": "tool_choice", "max_new_tokens": "max_tokens"}
_UNSUPPORTED = frozenset({"audio", "modalities", "web_search_options", "verbosity", "moderation", "length_penalty"})
# A misspelled part of a constraint leaves an answer free that should not be.
_CONSTRAINTS: Mapping[str, type[msgspec.Struct]] = {
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
}
_MAX_SHOWN = 40  # characters of a name
_MAX_NAMED = 8  # fields


def unknown_fields(body: bytes, kind: type[Any]) -> list[str]:
    """Return a warning for each field of a valid body, or of a constraint in it, that has no effect."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    given: Mapping[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    names = [name for name in given if name not in known and name not in _WITHOUT_EFFECT]
    warnings = list(_warnings(names[:_MAX_NAMED], known))
    if len(names) > _MAX_NAMED:
        warnings.append(f"{len(names) - _MAX_NAMED} more unknown fields")
    for field, kind_of_field in _CONSTRAINTS.items():
        if field in known and field in given:
            warnings += _constraint_warnings(field, given[field], kind_of_field)
    return warnings


def _constraint_warnings(field: str, raw: msgspec.Raw, kind: type[msgspec.Struct]) -> Iterator[str]:
    inner: Mapping[str, msgspec.Raw] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None) or {}
    names = [name for name in inner if name not in kind.__struct_fields__]
    for text in _warnings(names[:_MAX_NAMED], list(kind.__struct_fields__)):
        yield f"{field}: {text}"
    if field == "response_format":
        yield from _unused_schemas(msgspec.json.decode(raw, type=ResponseFormat | None))


def _unused_schemas(wanted: ResponseFormat | None) -> Iterator[str]:
    """Yield a warning for a schema that the type of the format does not use."""
    if wanted is None or wanted.type == "json_schema":
        return
    unused = ["json_schema"] if wanted.json_schema is not None else []
    if wanted.schema is not None and wanted.type != "json_object":
        unused.append("schema")
    for name in unused:
        yield f"response_format.{name} has no effect with type {wanted.type[:_MAX_SHOWN]!r}; use type 'json_schema'"


def _warnings(names: list[str], known: list[str]) -> Iterator[str]:
    for name in names:
        close = [_REPLACED[name]] if name in _REPLACED else get_close_matches(name, known, n=1, cutoff=0.6)
        if name in _UNSUPPORTED:
            yield f"{name!r} is not supported and has no effect"
        else:
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"unknown field {name[:_MAX_SHOWN]!r} has no effect{hint}"
