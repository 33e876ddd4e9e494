"""Structured output constraints of a request: JSON, a choice of strings, a regex, a grammar, or tags.

This is only the specification; `octavo.structured` compiles it to token masks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidParameterError

MAX_SPEC_BYTES = 1 << 19  # total for all texts of one request
MAX_SCHEMA_DEPTH = 128  # nesting of lists and objects
MAX_CHOICES = 10_000
MAX_TAGS = 1_000
MAX_REASONING_TOKENS = 1 << 20  # beyond any context length


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuralTag:
    """A constrained part of the output: `begin`, then text that matches the schema or grammar, then `end`.

    For example a tool call: `StructuralTag(begin="<tool_call>\\n", json_schema={...}, end="\\n</tool_call>")`. Where
    `begin` or `end` contains the text of one of the model's special tokens, it means that token. So does a literal of
    `grammar` that is one of `tokens`, as the whole literal. `trigger` is the prefix of `begin` that ends free text; by
    default all of `begin`. Tags with a common opening share one trigger.

    Raises InvalidParameterError: names the field, its value and the limit.
    """

    begin: str = ""
    json_schema: Mapping[str, Any] | str | None = None  # stored as JSON text
    grammar: str | None = None  # Lark
    end: str = ""
    trigger: str | None = None
    tokens: Sequence[str] = ()  # literals of `grammar` that stand for tokens, where the model has such

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            _check_text(f"tags.{name}", getattr(self, name))
        if (self.json_schema is None) == (self.grammar is None):
            raise InvalidParameterError("tags", "json_schema, grammar", "exactly one of them")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text("tags.json_schema", self.json_schema))
        else:
            _check_text("tags.grammar", self.grammar)
        object.__setattr__(self, "tokens", _tuple_of("tags.tokens", self.tokens))
        for text in self.tokens:
            _check_text("tags.tokens", text, low=1)
        if self.trigger is None:
            object.__setattr__(self, "trigger", self.begin)
        _check_text("tags.trigger", self.trigger)
        if not self.begin.startswith(self.trigger or ""):
            raise InvalidParameterError("tags.trigger", self.trigger, f"must be a prefix of `begin` ({self.begin!r})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasoning:
    """The reasoning before the answer: free text between two tags.

    A tag is a single token of the model, or begins with one: then it may have further tokens and text, and an answer
    whose reasoning alone is limited begins with it. `max_tokens` limits the reasoning: the end tag is forced after that
    many tokens. Raises InvalidParameterError: names
    the field, its value and the limit.
    """

    begin: str = "<think>"
    end: str = "</think>"
    is_open: bool = False  # the prompt already ends with `begin`; otherwise the model decides whether to reason
    max_tokens: int | None = None  # between the tags

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            _check_text(f"reasoning.{name}", getattr(self, name), low=1)
        if not isinstance(self.is_open, bool):
            raise InvalidParameterError("reasoning.is_open", self.is_open, "must be true or false")
        if self.max_tokens is not None:
            _check_count("reasoning.max_tokens", self.max_tokens, 0)
            if self.max_tokens > MAX_REASONING_TOKENS:
                raise InvalidParameterError("reasoning.max_tokens", self.max_tokens, f"at most {MAX_REASONING_TOKENS}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """The constraint on a response: exactly one of the first six fields, optionally after `reasoning`.

    Frozen and self-validating. With `reasoning` alone, the answer after the reasoning is unconstrained.

    The output always satisfies the constraint, unless `max_tokens` or a stop string cuts it short (see
    `finish_reason`). A schema is a `dict` or JSON text and is stored as JSON text. Lists are accepted and stored as
    tuples.

    `tags` are constrained parts within free text; with `free_text=False` only `separator` may come between them. The
    output has at least `min_tags` and at most `max_tags`, and ends after the last of these.

    Errors that only the grammar compiler can find (an unsupported keyword, an invalid regex) are raised when the
    request enters the engine.

    Raises InvalidParameterError: names the field, its value and the limit.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False  # any JSON object
    regex: str | None = None  # must match the whole answer
    choice: Sequence[str] = ()
    grammar: str | None = None  # Lark, or EBNF in GBNF syntax (`root ::= ...`)
    tags: Sequence[StructuralTag] = ()
    free_text: bool = True  # before and between the tags
    separator: str = ""  # between tags when there is no free text
    min_tags: int = 0
    max_tags: int | None = None
    reasoning: Reasoning | None = None  # the reasoning before the constrained answer
    opening: str = ""  # what comes right before the constrained answer; special tokens as in tags

    def __post_init__(self) -> None:
        self._store_lists()
        if not isinstance(self.json_object, bool):
            raise InvalidParameterError("json_object", self.json_object, "must be true or false")
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise InvalidParameterError("reasoning", self.reasoning, "must be Reasoning")
        if len(given) != 1 and not (self.reasoning and not given):
            raise InvalidParameterError("structured_output", ", ".join(given), f"exactly one of {', '.join(KINDS)}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text("json_schema", self.json_schema))
        _check_text("opening", self.opening)
        if self.opening and not given:
            raise InvalidParameterError("opening", self.opening, f"requires one of {', '.join(KINDS)}")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), low=1)
        self._check_tags()

    @property
    def kind(self) -> str:
        """The name of the field that is set; `reasoning` if there is no other."""
        return next((name for name in KINDS if getattr(self, name) not in (None, False, ())), "reasoning")

    def _store_lists(self) -> None:
        for name in ("choice", "tags"):
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name)))
        if len(self.choice) > MAX_CHOICES:
            raise InvalidParameterError("choice", len(self.choice), f"at most {MAX_CHOICES} strings")
        for text in self.choice:
            _check_text("choice", text, low=1)
        _check_total("choice", self.choice)

    def _check_tags(self) -> None:
        if len(self.tags) > MAX_TAGS:
            raise InvalidParameterError("tags", len(self.tags), f"at most {MAX_TAGS}")
        if not all(isinstance(tag, StructuralTag) for tag in self.tags):
            raise InvalidParameterError("tags", self.tags, "every entry must be a StructuralTag")
        _check_total("tags", [str(tag.json_schema or tag.grammar) for tag in self.tags])
        if not isinstance(self.free_text, bool):
            raise InvalidParameterError("free_text", self.free_text, "must be true or false")
        if self.tags and self.free_text and not all(tag.trigger for tag in self.tags):
            raise InvalidParameterError("tags.begin", "", "must not be empty if free text may precede it")
        _check_text("separator", self.separator)
        if self.separator and (self.free_text or not self.tags):
            raise InvalidParameterError("separator", self.separator, "requires tags and free_text=False")
        _check_count("min_tags", self.min_tags, 0)
        if self.max_tags is not None:
            _check_count("max_tags", self.max_tags, max(1, self.min_tags))
        if not self.tags and (self.min_tags or self.max_tags is not None or not self.free_text):
            raise InvalidParameterError("min_tags, max_tags, free_text", self.kind, "requires tags")


KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "tags")


def _tuple_of(field: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidParameterError(field, value, "must be a list")
    return tuple(value)


def _check_text(field: str, value: object, *, low: int = 0) -> None:
    if not isinstance(value, str):
        raise InvalidParameterError(field, value, "must be a string")
    if len(value) < low:
        raise InvalidParameterError(field, value, "must not be empty")
    _check_total(field, [value])


def _check_total(field: str, texts: Sequence[str]) -> None:
    try:
        num_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise InvalidParameterError(field, "...", "contains an unpaired surrogate") from error
    if num_bytes > MAX_SPEC_BYTES:
        raise InvalidParameterError(field, f"{num_bytes} bytes", f"at most {MAX_SPEC_BYTES} bytes")


def _check_count(field: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidParameterError(field, value, f"must be an integer, at least {low}")


def _schema_text(field: str, schema: object) -> str:
    """Return a JSON schema as JSON text, after checking its size and depth."""
    if isinstance(schema, str):
        _check_text(field, schema, low=1)
    try:
        tree = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(tree, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except json.JSONDecodeError as error:
        where = f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidParameterError(field, "...", where) from error
    except RecursionError as error:
        raise InvalidParameterError(field, "...", f"at most {MAX_SCHEMA_DEPTH} levels deep") from error
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(field, "...", f"not JSON: {error}") from error
    if not isinstance(tree, Mapping):
        raise InvalidParameterError(field, type(tree).__name__, "a JSON schema must be an object")
    _check_text(field, text)
    if (depth := _depth(tree)) > MAX_SCHEMA_DEPTH:
        raise InvalidParameterError(field, f"{depth} levels", f"at most {MAX_SCHEMA_DEPTH} levels deep")
    return text


def _depth(tree: object) -> int:
    """Return the nesting depth of lists and objects. Level by level: recursion could overflow the stack."""
    level, depth = [tree], 0
    while level := [node for node in level if isinstance(node, (Mapping, list, tuple))]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, Mapping) else node)]
    return depth
