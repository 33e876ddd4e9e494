"""Strict reading of a checkpoint's JSON files: errors name the file and the key that is missing or malformed."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError

# Larger sizes are bogus: they would cost memory or time for a model whose weights cannot exist.
_MAX_INTEGER = 2**31 - 1
_MAX_SIZES = MappingProxyType(
    {
        "num_hidden_layers": 1 << 11,
        **dict.fromkeys(("num_experts", "num_local_experts", "num_attention_heads", "num_key_value_heads"), 1 << 13),
        "head_dim": 1 << 14,
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 24,
        "vocab_size": 1 << 26,
    }
)


class JsonFields:
    """One JSON object whose values are checked on access.

    A null value counts as absent; `nulls` has those keys, for the few cases where the two differ. `origin` is the file,
    plus the key of the enclosing object if any; every `CheckpointError` starts with it.
    """

    def __init__(self, origin: str, values: Mapping[str, Any]) -> None:
        self.origin = origin
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = frozenset(key for key, value in values.items() if value is None)

    @classmethod
    def read(cls, path: Path) -> "JsonFields":
        """Read a file that must contain one JSON object."""
        values = _parsed(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: a JSON object is expected, found {type(values).__name__}")
        return cls(str(path), values)

    @classmethod
    def read_list(cls, path: Path) -> list["JsonFields"]:
        """Read a file that must contain a list of JSON objects."""
        return cls(str(path), {"": _parsed(path)}).objects("")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "JsonFields":
        """Return the object with `defaults` of absent keys; null stays null."""
        values = {**self.values, **dict.fromkeys(self.nulls)}
        return JsonFields(self.origin, {**defaults, **values})

    def with_key(self, key: str, value: Any) -> "JsonFields":
        """Return the object with another value of a key."""
        return JsonFields(self.origin, {**dict.fromkeys(self.nulls), **self.values, key: value})

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, key: str, why: str) -> CheckpointError:
        """Build the error for a bad value."""
        return CheckpointError(f"{self.origin}: {key}={self.values.get(key)!r}: {why}")

    def unsupported(self, key: str, hint: str = "") -> UnsupportedModelError:
        """Build the error for a setting that would change the result."""
        return UnsupportedModelError(f"{self.origin}: {key}={self.values.get(key)!r} is not supported{hint}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`, and no greater than any model's."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "an integer is expected")
        if value < minimum:
            raise self.fail(key, f"at least {minimum} is expected")
        if value > (maximum := _MAX_SIZES.get(key, _MAX_INTEGER)):
            raise self.fail(key, f"at most {maximum} is expected")
        return value

    def number(self, key: str, default: float | None = None, *, can_be_zero: bool = False) -> float:
        """Return a finite number above zero, or zero if allowed."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a number is expected")
        if not 0 <= value < float("inf") or (value == 0 and not can_be_zero):
            raise self.fail(key, f"a finite number {'of at least' if can_be_zero else 'above'} 0 is expected")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false is expected")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "a string is expected")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of strings is expected")
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of integers of at least 0; empty if absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= _MAX_INTEGER for item in value):
            raise self.fail(key, f"a list of integers of 0 to {_MAX_INTEGER} is expected")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(key, f"a list of {count} numbers is expected")
        if not all(type(item) in (int, float) and 0 < item < float("inf") for item in value):
            raise self.fail(key, "finite numbers above 0 are expected")
        return tuple(map(float, value))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty if absent or -1, as old checkpoints say it."""
        value = self.values.get(key, [])
        ids = value if isinstance(value, list) else [] if value == -1 else [value]
        if not all(type(item) is int and 0 <= item < _MAX_SIZES["vocab_size"] for item in ids):
            raise self.fail(key, "a token id or a list of token ids is expected")
        return tuple(ids)

    def nested(self, key: str) -> "JsonFields":
        """Return a nested object; empty if absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "an object is expected")
        return JsonFields(f"{self.origin}: {key}", value)

    def objects(self, key: str) -> list["JsonFields"]:
        """Return a list of objects; empty if absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(key, "a list of objects is expected")
        return [JsonFields(f"{self.origin}: {key}: {index}", item) for index, item in enumerate(value)]

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.origin}: the key {key!r} is missing")
        return value


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_contradiction)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error


def _without_contradiction(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; of a key that is given twice, readers differ in which value they take."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:  # NaN is not equal to itself
            raise ValueError(f"{key!r} is given twice: {values[key]!r} and {value!r}")
        values[key] = value
    return values
