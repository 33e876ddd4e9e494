"""`ToolCallParser`, the base of all tool-calling formats, and the parameters of tools for formats other than JSON.

A call is emitted once its name is certain and its arguments have started; from then on its arguments stream. Text that
turns out earlier not to be a call is content, as is a call of a tool that was not offered. A call that breaks off later
keeps what was streamed of it. Where an answer is cut by its length limit, the markup of an unfinished call is dropped.
"""

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

from octavo.server.openai.parsers.base import (
    MalformedError,
    Steps,
    StreamParser,
    ToolCallArguments,
    ToolCallStart,
    open_tail,
)
from octavo.structured.schema import compiler_schema
from octavo.structured_output import StructuralTag

REMARKS = frozenset({"title", "description", "default", "examples", "$comment", "$schema"})
_DEFINITIONS = ("$defs", "definitions")
_UNDERSTOOD = REMARKS | {*_DEFINITIONS, "type", "properties", "required", "additionalProperties"}
_PLAIN_STRING = REMARKS | {*_DEFINITIONS, "type", "enum", "const"}
MIN_PART = 2  # characters; a single `<` at the end of a cut answer is rather text than a marker
_MAX_OPTIONAL = 64  # grammars with commas grow quadratically
NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
TAG_CONTENTS = ("json_schema", "grammar")  # fields of a tag that come from a schema

Schemas: TypeAlias = Mapping[str, Mapping[str, object]]  # the tools of a request: name -> JSON schema of the arguments


def json_tag(begin: str, schema: Mapping[str, object], end: str, *, trigger: str) -> StructuralTag:
    """Constrain a call whose arguments are one JSON object, empty for tools without parameters."""
    return StructuralTag(begin=begin, json_schema=schema or NO_ARGUMENTS, end=end, trigger=trigger)


def lark_tag(
    begin: str, rules: str, end: str = "", *, trigger: str | None = None, tokens: tuple[str, ...] = ()
) -> StructuralTag:
    """Constrain a call whose arguments follow `rules` in Lark's notation, with literals of `tokens`."""
    return StructuralTag(begin=begin, grammar=rules, end=end, trigger=trigger, tokens=tokens)


class ToolCallParser(StreamParser):
    """Parses one answer; each subclass is one format."""

    markers: ClassVar[tuple[str, ...]] = ()  # markers that may be special tokens of the model
    separator: ClassVar[str] = ""  # between two calls
    writes_json: ClassVar[bool] = True  # whether the arguments of a call are one JSON object
    marks_names: ClassVar[bool] = True  # whether a marker announces a call before its name
    calls_once: ClassVar[bool] = False  # whether an answer ends with its first call
    answer_begin: ClassVar[str] = ""  # what has to come before an answer that is no call

    def __init__(self, schemas: Schemas, draw: Callable[[], bytes] | None = None, max_calls: int | None = None) -> None:
        """`draw` returns at least 12 new random bytes for the id of a call."""
        super().__init__()
        self._schemas = schemas
        self._draw = draw or partial(secrets.token_bytes, 12)
        self._max_calls = max_calls  # later ones are read, but not emitted
        self._num_calls = 0

    @staticmethod
    def call_id(drawn: bytes) -> str:
        """Return the id that these random bytes stand for."""
        return f"call_{drawn[:12].hex()}"

    @classmethod
    @abstractmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Constrain a call of `name` to arguments that match `schema`; None if the format cannot express that."""

    @classmethod
    def tags(cls, schemas: Schemas) -> list[StructuralTag] | None:
        """Constrain a call to one of these tools; None if the format cannot express one of the schemas."""
        tags = [tag for name, schema in schemas.items() if (tag := cls.tag(name, schema)) is not None]
        return tags if len(tags) == len(schemas) else None

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag] | None:
        """Constrain calls in free text to these names, not to every detail of their schemas; None: `tags` will do."""
        return None

    @classmethod
    def openings(cls, schemas: Schemas) -> tuple[str, ...]:
        """Return texts that can be nothing but the beginning of a call, so that they end unfinished reasoning."""
        return ()

    def _start(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call; from here on there is no backtracking."""
        self._marked = None
        self._num_calls += 1
        if self._is_within_limit:
            self._deltas.append(ToolCallStart(self._num_calls - 1, call_id or self.call_id(self._draw()), name))

    def _arguments(self, text: str) -> None:
        if text and self._is_within_limit:
            self._deltas.append(ToolCallArguments(self._num_calls - 1, text))

    @property
    def _is_within_limit(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _attempt(self, call: Steps[None]) -> Steps[bool]:
        """Try to read a call; rewind and return False if it is malformed, unless the length limit has cut it."""
        self._mark()
        try:
            yield from call
        except MalformedError:
            if self._broke_off:
                self._drop_cut_markup()
            else:
                self._rewind()
            return False
        self._marked = None
        return True

    def _read_marked_calls(self, read_call: Callable[[], Steps[None]], *begins: str) -> Steps[None]:
        while (yield from self._copy_until(begins, self._content)):
            if not (yield from self._attempt(read_call())):
                self._pass_over(*begins)
        self._close_text()

    def _read_calls_until(self, end: str, read_call: Callable[[], Steps[None]]) -> Steps[None]:
        """Read one call at least, then the end of their section, which models forget."""
        yield from read_call()
        while (yield from self._attempt(read_call())):
            pass
        yield from self._attempt(self._expect_next(end))

    def _pass_over(self, *markers: str) -> None:
        """Emit a marker that did not open a call, and the white space before it, as content."""
        text = self._rest
        ends = [text.index(marker) + len(marker) for marker in markers if marker in text]
        end = min(ends, default=0)  # nothing is left of a call that was cut
        self._content(text[:end])
        self._skip(end)

    def _close_text(self) -> None:
        """Emit the rest of the text; white space after a call belongs to the call, part of a marker to one cut off."""
        self._drop_cut_marker()
        rest = self._rest
        if rest.strip() or not self._num_calls:
            self._content(rest)
        self._skip(len(rest))

    def _drop_cut_marker(self) -> None:
        if self._is_cut and open_tail(self._rest, self.markers) >= MIN_PART:
            self._drop_cut_markup()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter; `schema` is self-contained, with all definitions it refers to."""

    name: str
    schema: Mapping[str, object]
    is_required: bool

    @property
    def is_string(self) -> bool:
        """Whether formats without quotes write it verbatim."""
        return self.schema.get("type") == "string"

    @property
    def strings(self) -> list[str] | None:
        """The allowed strings; empty if any, None if unknown."""
        if not self.is_string or set(self.schema) - _PLAIN_STRING:
            return None
        values = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum", [])
        return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def parameters_of(schema: Mapping[str, object]) -> list[Parameter] | None:
    """Return the parameters of a tool, required ones first; None if they depend on one another."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if set(schema) - _UNDERSTOOD or not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not all(isinstance(each, dict) for each in properties.values()):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    if len(properties) - len(set(required)) > _MAX_OPTIONAL:
        return None
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    parameters = [
        Parameter(name=name, schema={**shared, **each}, is_required=name in required)
        for name, each in properties.items()
    ]
    return sorted(parameters, key=lambda parameter: not parameter.is_required)


def json_rule(schema: Mapping[str, object]) -> str:
    """Return the expression in Lark for JSON that matches a schema."""
    return f"%json {compiler_schema(json.dumps(schema))}"


def quoted(text: str) -> str:
    """Return text as a literal in Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
