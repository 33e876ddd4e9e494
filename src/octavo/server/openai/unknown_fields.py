"""Finds the fields of a request that have no effect, so that a misspelled one does not go unnoticed.

They are no errors: official clients send more fields with every version.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

# For a provider's own use, or without an effect on the answer: every request may carry them.
_WITHOUT_EFFECT = frozenset(
    (
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction",
    )
)  # fmt: skip
_REPLACED = {"functions": "tools", "function_call": "tool_choice", "max_new_tokens": "max_tokens"}
_UNSUPPORTED = frozenset({"audio", "modalities", "web_search_options", "verbosity", "moderation", "length_penalty"})
_MAX_SHOWN = 40  # characters of a name
_MAX_NAMED = 8  # fields


def unknown_fields(body: bytes, kind: type[Any]) -> list[str]:
    """Return a warning for each top-level field of a valid body that `kind` lacks."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    given: Mapping[str, object] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    names = [name for name in given if name not in known and name not in _WITHOUT_EFFECT]
    warnings = list(_warnings(names[:_MAX_NAMED], known))
    return warnings if len(names) <= _MAX_NAMED else [*warnings, f"{len(names) - _MAX_NAMED} more unknown fields"]


def _warnings(names: list[str], known: list[str]) -> Iterator[str]:
    for name in names:
        close = [_REPLACED[name]] if name in _REPLACED else get_close_matches(name, known, n=1, cutoff=0.6)
        if name in _UNSUPPORTED:
            yield f"{name!r} is not supported and has no effect"
        else:
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"unknown field {name[:_MAX_SHOWN]!r} has no effect{hint}"
