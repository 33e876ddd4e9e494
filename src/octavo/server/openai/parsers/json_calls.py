"""Formats whose calls are JSON, `{"name": "f", "arguments": {...}}`: Hermes, Llama 3, Mistral; and how JSON is read.

Lenient where models are careless and it is harmless (a line break inside a string, which is escaped), strict where an
error must not swallow what follows: brackets match, and outside strings only characters of JSON syntax are allowed.
"""

import json
import re
import string
from collections.abc import Mapping
from typing import ClassVar

from octavo.server.openai.parsers.base import Emit, MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import Schemas, ToolCallParser, json_rule, json_tag, lark_tag, quoted
from octavo.structured_output import StructuralTag

_ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_OUTSIDE = re.compile(r'["{}\[\]\x00-\x1f]|[^\s\w:,.+\-]')
_SCALAR = re.compile(r"[\w.+\-]*")
_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[\w.\-]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonCallParser(ToolCallParser):
    """The base of formats that write a call as one JSON object."""

    name_keys: ClassVar[tuple[str, ...]] = ("name",)

    def _read_json_call(self, *ends: str, is_strict: bool = False) -> Steps[None]:
        """Read the object that begins here; its arguments are emitted as they come, malformed ones up to `ends`.

        `is_strict`: without a tag, missing arguments or other keys before them make it plain JSON. Raises
        MalformedError: it is not a call, or was cut before its arguments.
        """
        name: str | None = None
        arguments: str | None = None
        yield from self._expect("{")
        try:
            while True:
                key = yield from self._read_key(is_strict=is_strict and (name is None or arguments is None))
                if key in self.name_keys:
                    name = yield from self._read_string()
                    if name not in self._schemas:
                        raise MalformedError("name")
                elif key not in _ARGUMENT_KEYS:
                    yield from self._read_json()
                elif name is not None and (yield from self._peek()) == "{":
                    yield from self._stream_arguments(name, ends)
                    return
                else:
                    arguments = yield from self._read_json()
                if not (yield from self._has_more_keys()):
                    break
        except MalformedError:
            if name is not None and self._broke_off:  # that is all that is known of the call
                self._start(name)
            raise
        if name is None:
            raise MalformedError("name")
        text = _arguments_text(arguments, is_strict)
        self._start(name)
        self._arguments(text)

    def _stream_arguments(self, name: str, ends: tuple[str, ...]) -> Steps[None]:
        self._start(name)
        if not (yield from self._copy_json(self._arguments)):
            if ends:
                yield from self._copy_until(ends, self._arguments)
            else:
                yield from self._copy_rest(self._arguments)
            return
        yield from self._attempt(self._read_other_keys())  # the call is complete; a malformed end stays in the text

    def _read_other_keys(self) -> Steps[None]:
        while (yield from self._has_more_keys()):
            yield from self._read_key(is_strict=False)
            yield from self._read_json()

    def _read_key(self, *, is_strict: bool) -> Steps[str]:
        yield from self._skip_space()
        key = yield from self._read_string()
        if is_strict and key not in (*_ARGUMENT_KEYS, *self.name_keys, "id", "type"):
            raise MalformedError(key)
        yield from self._expect_next(":")
        yield from self._skip_space()
        return key

    def _read_calls(self) -> Steps[None]:
        """Read the list of calls that comes next; its end is optional. Raises MalformedError: there is no call."""
        yield from self._read_member_call("[")
        while (yield from self._attempt(self._read_member_call(","))):
            pass
        yield from self._attempt(self._expect_next("]"))

    def _read_member_call(self, before: str) -> Steps[None]:
        yield from self._expect_next(before)
        yield from self._skip_space()
        yield from self._read_json_call()

    def _has_more_keys(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._takes(",")):
            return True
        yield from self._expect("}")
        return False

    def _copy_json(self, emit: Emit) -> Steps[bool]:
        """Emit the object, array or string that begins here, with raw control characters escaped.

        Returns whether it was complete; if not, the malformed part or the end of the text comes next.
        """
        scanner = JsonScanner()
        while True:
            size, written = scanner.read(self._rest)
            self._skip(size)
            emit(written)
            if scanner.complete or scanner.broken or self._has_run_out():
                return scanner.complete
            yield

    def _read_json(self) -> Steps[str]:
        """Return the text of the value of any type that begins here. Raises MalformedError: none, or without an end."""
        pieces: list[str] = []
        if (yield from self._peek()) in ('"', "{", "["):
            if not (yield from self._copy_json(pieces.append)):
                raise MalformedError("value")
            return "".join(pieces)
        scalar = yield from self._read_while(_SCALAR)
        if not scalar:
            raise MalformedError("value")
        return scalar

    def _read_string(self) -> Steps[str]:
        """Return the value of the JSON string that begins here. Raises MalformedError: there is no valid one."""
        if (yield from self._peek()) != '"':
            raise MalformedError("string")
        text = yield from self._read_json()
        try:
            return str(json.loads(text, strict=False))
        except ValueError as error:
            raise MalformedError("string") from error


class HermesParser(JsonCallParser):
    """Calls of Hermes and Qwen models in tags, `<tool_call>...</tool_call>`, of which the end tag is optional."""

    BEGIN, END = "<tool_call>", "</tool_call>"
    markers = (BEGIN, END)
    separator = "\n"

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        return json_tag(f"{cls.BEGIN}\n{_opening(name)}", schema, f"}}\n{cls.END}", trigger=cls.BEGIN)

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_call, self.BEGIN)

    def _read_call(self) -> Steps[None]:
        yield from self._expect_next(self.BEGIN)
        yield from self._skip_space()
        yield from self._read_json_call(self.END)
        yield from self._attempt(self._expect_next(self.END))


class Llama3JsonParser(JsonCallParser):
    """Calls of Llama 3.1 and later at the beginning of the text or after a tag, several joined by `;`.

    The name of the arguments is `parameters`. There are no tags, or at most `<|python_tag|>` before the calls, or
    `<|python_start|>` and `<|python_end|>` in Llama 4. So an answer is a call only if it begins as one and names a tool
    of the request: other JSON may be what the user asked for.
    """

    BEGINS, END = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"
    markers = (*BEGINS, END)
    separator = "; "
    marks_names = False

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        """Without a tag, only the whole beginning distinguishes a call from other JSON."""
        begin = f'{{"name": {json.dumps(name)}, "parameters": '
        return json_tag(begin, schema, "}", trigger=begin)

    def _read(self) -> Steps[None]:
        is_call = yield from self._attempt(self._read_call())
        if not is_call and (yield from self._copy_until(self.BEGINS, self._content)):
            is_call = yield from self._attempt(self._read_call())
        while is_call:
            is_call = yield from self._attempt(self._read_next_call())
        if self._num_calls:
            yield from self._attempt(self._expect_next(self.END))
        self._drop_cut_marker()
        yield from self._copy_until((), self._content)
        self._close_text()

    def _read_next_call(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._takes(";")
        yield from self._read_call()

    def _read_call(self) -> Steps[None]:
        yield from self._skip_space()
        for tag in self.BEGINS:
            yield from self._takes(tag)
        yield from self._skip_space()
        yield from self._read_json_call(is_strict=True)


class MistralParser(JsonCallParser):
    """Calls of Mistral models, after `[TOOL_CALLS]`: a JSON list, or, in newer models, `name[ARGS]{...}` for each.

    Their chat templates require ids of nine letters and digits.
    """

    markers = (_TOOL_CALLS, _CALL_ID, _ARGS)

    @staticmethod
    def call_id(drawn: bytes) -> str:
        number, characters = int.from_bytes(drawn), string.ascii_letters + string.digits
        return "".join(
            characters[number // len(characters) ** place % len(characters)] for place in range(9)
        )  # 53 bits

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        return json_tag(f"{_TOOL_CALLS}[{_opening(name)}", schema, "}]", trigger=_TOOL_CALLS)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag] | None:
        """Models write several calls in one list."""
        calls = [f"{quoted(_opening(name))} {json_rule(schema)}" for name, schema in schemas.items()]
        rules = f'start: " "? "[" call (/, ?/ call)* "]"\ncall: ({" | ".join(calls)}) "}}"'
        return [lark_tag(_TOOL_CALLS, rules)]

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_marked, _TOOL_CALLS)

    def _read_marked(self) -> Steps[None]:
        yield from self._expect_next(_TOOL_CALLS)
        yield from self._skip_space()
        if (yield from self._peek()) != "[":
            yield from self._read_named_call()
            return
        yield from self._read_calls()

    def _read_named_call(self) -> Steps[None]:
        name = yield from self._read_while(_WORD)
        call_id = (yield from self._read_while(_WORD)) if (yield from self._takes(_CALL_ID)) else None
        has_args = yield from self._takes(_ARGS)
        yield from self._skip_space()
        is_known = (yield from self._peek()) == "{" or (has_args and self._broke_off)
        if not (is_known and name in self._schemas):
            raise MalformedError("call")
        self._start(name, call_id)
        if not (yield from self._copy_json(self._arguments)):
            yield from self._copy_rest(self._arguments)


class MistralArgsParser(MistralParser):
    """Newer models, which write calls with `[ARGS]`, each with its own marker; both formats are parsed."""

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        return json_tag(f"{_TOOL_CALLS}{name}{_ARGS}", schema, "", trigger=_TOOL_CALLS)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag] | None:
        return None


def _opening(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _arguments_text(arguments: str | None, are_needed: bool) -> str:
    """Return the arguments as a JSON object: some models write it as a string, or omit it."""
    if arguments is None or arguments == "null":
        if are_needed:
            raise MalformedError("arguments")
        return "{}"
    try:
        text = json.loads(arguments, strict=False) if arguments.startswith('"') else arguments
        if not isinstance(json.loads(text, strict=False), dict):
            raise MalformedError("arguments")
        text.encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError) as error:
        raise MalformedError("arguments") from error
    return JsonScanner().read(str(text))[1] if _CONTROL.search(text) else str(text)


class JsonScanner:
    """Scans one object, array or string: `complete` at its end, `broken` at what cannot be JSON."""

    __slots__ = ("_awaited", "_escaped", "_in_string", "broken", "complete")

    def __init__(self) -> None:
        self._awaited: list[str] = []  # brackets still open
        self._in_string = False
        self._escaped = False
        self.complete = False
        self.broken = False

    def read(self, text: str) -> tuple[int, str]:
        """Return how many characters of `text`, the next piece, belong to the value, and them as valid JSON."""
        pieces: list[str] = []
        first = position = 0  # what is not in `pieces` yet begins at `first`
        while position < len(text):
            if self._escaped and text[position] >= " ":
                self._escaped = False
                position += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, position)
            if found is None:
                position = len(text)
            elif found[0] >= " ":
                self._step(found[0])
                position = found.start() if self.broken else found.end()
                if self.complete or self.broken:
                    break
            else:
                spelled = self._control(found[0])
                position = found.start()
                if spelled is None:
                    self.broken = True
                    break
                pieces += [text[first:position], spelled]
                first = position = found.end()
        rest = text[first:position]
        return position, "".join([*pieces, rest]) if pieces else rest

    def _control(self, character: str) -> str | None:
        """Return a control character as JSON spells it; None outside strings, unless it is white space."""
        if not self._in_string:
            return character if character in "\t\n\r" else " " if character.isspace() else None
        was_escaped, self._escaped = self._escaped, False
        return json.dumps(character)[2 if was_escaped else 1 : -1]  # the backslash may be there already

    def _step(self, character: str) -> None:
        if self._in_string:
            self._escaped = character == "\\"
            self._in_string = self._escaped
        elif character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._awaited.append(_CLOSING[character])
        elif self._awaited and character == self._awaited[-1]:
            self._awaited.pop()
        else:
            self.broken = True
        self.complete = not (self._awaited or self._in_string or self.broken)
