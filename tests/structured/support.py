"""Answers drawn at random from what a grammar allows, and a validator for the schemas of these tests.

The walk knows nothing of the form: whatever it writes is held to the form by the masks alone.
"""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.tokenizer.conftest import FAMILIES
from tokenizers import Tokenizer as Backend

from octavo.contracts.schedule import Int32Array
from octavo.demo import __file__ as demo_file
from octavo.structured.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from octavo.structured_output import StructuredOutput
from octavo.tokenizer.files import TokenizerFiles, read_tokenizer_files
from octavo.tokenizer.tokenizer import Tokenizer

PADDING = 70  # ids of the model beyond the tokenizer's
END_TEXT = {"demo": "<|im_end|>", "byte_level": "<|im_end|>", "sentencepiece": "</s>"}


@cache
def tokenizer_of(family: str) -> tuple[Tokenizer, Backend]:
    """Return a tokenizer, ours and the library's: the demo model's, or a small one of a family."""
    if family == "demo":
        files = read_tokenizer_files(Path(demo_file).parent)
    else:
        make, named = FAMILIES[family]
        files = TokenizerFiles(backend=make(), named_tokens=named, chat_templates={})
    return Tokenizer(files), files.backend


@cache
def backend_of(family: str) -> LLGuidanceBackend:
    """Return a backend for a model whose vocabulary is padded."""
    tokenizer, library = tokenizer_of(family)
    return LLGuidanceBackend(
        library.to_str(),
        num_tokens=tokenizer.vocab_size,
        vocab_size=tokenizer.vocab_size + PADDING,
        added_tokens={token.content: id_ for id_, token in library.get_added_tokens_decoder().items()},
        end_token_ids=[end_id(family)],
    )


def end_id(family: str) -> int:
    token_id = tokenizer_of(family)[1].token_to_id(END_TEXT[family])
    assert token_id is not None
    return token_id


def allowed_ids(words: Int32Array) -> list[int]:
    """Return the ids whose bits are set in one mask [W]."""
    found: list[int] = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def mask_of(backend: LLGuidanceBackend, matcher: LLGuidanceMatcher) -> list[int]:
    """Return which ids may come next."""
    words = np.zeros((1, backend.num_words), dtype=np.int32)
    assert backend.fill_masks([matcher], words) == [None]
    return allowed_ids(words[0])


def random_answer(
    family: str,
    constraint: StructuredOutput,
    seed: int,
    max_tokens: int = 600,
    choose: Callable[[random.Random, list[int]], int] = random.Random.choice,
) -> str | None:
    """Write one answer token by token, each drawn from all that are allowed; None if it does not end by itself."""
    tokenizer, _ = tokenizer_of(family)
    backend = backend_of(family)
    matcher, rng = backend.compile(constraint), random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        token_id = choose(rng, mask_of(backend, matcher))
        assert token_id < tokenizer.vocab_size, "padding"
        if token_id == end_id(family):
            return text_of(tokenizer, token_ids)
        token_ids.append(token_id)
        matcher.accept(token_id)
        if matcher.is_complete:
            return text_of(tokenizer, token_ids)
    return None


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return text as it stands in the midst of an answer; it must be UTF-8."""
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """Judge a value by a schema, as far as these tests use the language."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    has_form: Callable[..., bool] = _CONSTRAINTS.get(type(value), _is_valid_number)
    return _is_of_type(value, schema) and _is_in_branches(value, schema, root) and has_form(value, schema, root)


_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "boolean": bool,
}


def parse(text: str) -> Any:
    """Parse JSON; an object with a key twice is none."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), f"a key twice: {pairs}"
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def _is_of_type(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "type" not in schema:
        return True
    # To Python a boolean is an integer.
    return isinstance(value, bool) == (schema["type"] == "boolean") and isinstance(value, _TYPES[schema["type"]])


def _is_in_branches(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    for name, many in (("anyOf", any), ("allOf", all)):
        if name in schema and not many(is_valid(value, branch, root) for branch in schema[name]):
            return False
    return True


def _is_valid_object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    known = schema.get("properties", {})
    other = schema.get("additionalProperties", {})
    if not value.keys() >= set(schema.get("required", ())) or (other is False and not value.keys() <= known.keys()):
        return False
    return all(is_valid(inner, known.get(key, other), root) for key, inner in value.items())


def _is_valid_array(value: list[Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return False
    return all(is_valid(inner, schema.get("items", {}), root) for inner in value)


def _is_valid_string(value: str, schema: dict[str, Any], _: dict[str, Any]) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    return "pattern" not in schema or re.search(schema["pattern"], value) is not None


def _is_valid_number(value: float | None, schema: dict[str, Any], _: dict[str, Any]) -> bool:
    return value is None or bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


_CONSTRAINTS: dict[type, Callable[..., bool]] = {dict: _is_valid_object, list: _is_valid_array, str: _is_valid_string}

# Every answer ends within a few hundred tokens, so that no cap hides a fault.
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["calm", 'good "old" one', "né\n🙂"]},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": [1, 22, None, "x"]}, "minItems": 2, "maxItems": 5},
    "union": {
        "anyOf": [
            {"type": "null"},
            {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            },
        ]
    },
    "tree": {
        "$defs": {
            "leaf": {"enum": ["a", "b"]},
            "pair": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
                "required": ["left", "right"],
                "additionalProperties": False,
            },
        },
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/pair"}},
        "required": ["root"],
        "additionalProperties": False,
    },
}
