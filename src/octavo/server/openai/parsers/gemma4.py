"""Calls of Gemma 4: `<|tool_call>call:f{key:<|"|>text<|"|>,n:42,o:{k:true},l:[1,2]}<tool_call|>`.

Keys are bare, strings stand between delimiters and escape nothing. Also read is what models write by mistake: a call at
the beginning of the answer without `<|tool_call>`, one without `call`, parentheses for braces, keys and strings in
delimiters of either kind, words without any. Arguments become JSON as they come, and JSON without an error: what breaks
off otherwise than by the length limit is closed.
"""

import json
import re
from collections.abc import Mapping

from octavo.server.openai.parsers.base import MalformedError, Steps, open_tail
from octavo.server.openai.parsers.gemma4_grammar import argument_rules
from octavo.server.openai.parsers.json_calls import JsonCallParser
from octavo.server.openai.parsers.tool_calls import Schemas, json_tag, lark_tag, quoted
from octavo.structured_output import StructuralTag

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = "call:"
_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"[^:={}\[\](),<>\"\n]*")
_WORD = re.compile(r"[^,{}\[\]()<>\"\n]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLIPPED = re.compile(r"-?[0-9]+\.|-?\.[0-9]+")  # numbers that JSON writes with another digit
_MAX_DEPTH = 64  # of lists and objects


class Gemma4Parser(JsonCallParser):
    """Parses text with such calls."""

    markers = (BEGIN, END, QUOTE)
    writes_json = False

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        """A schema that cannot be told in this notation is told in JSON, which is read as well."""
        rules = argument_rules(schema, QUOTE)
        if rules is None:
            return json_tag(f"{BEGIN}{_CALL}{name}", schema, END, trigger=BEGIN)
        return lark_tag(f"{BEGIN}{_CALL}{name}{{", rules, f"}}{END}", trigger=BEGIN, tokens=cls.markers)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write arguments in an order of their own."""
        rules = [
            "start: string* rest",
            rf"string[lazy]: /(.|\n)*/ {quoted(QUOTE)}",
            rf"rest[lazy]: /(.|\n)*/ {quoted(END)}",
        ]
        return [
            lark_tag(f"{BEGIN}{_CALL}{name}{{", "\n".join(rules), trigger=BEGIN, tokens=cls.markers) for name in schemas
        ]

    def _read(self) -> Steps[None]:
        self._unclosed: list[str] = []  # what has to come before the arguments are JSON, the last first
        self._before = ""  # what has to come before the next value
        while (yield from self._attempt(self._read_call())):
            pass
        yield from self._read_marked_calls(self._read_call, BEGIN)

    def _read_call(self) -> Steps[None]:
        yield from self._skip_space()
        is_marked = yield from self._takes(BEGIN)
        yield from self._skip_space()
        if not (yield from self._takes(_CALL)):
            if not is_marked:
                raise MalformedError("call")
            yield from self._takes(":")
        name = yield from self._read_while(_NAME)
        yield from self._skip_space()
        if name not in self._schemas or (yield from self._peek()) not in ("{", "("):
            raise MalformedError("name")
        self._start(name)
        self._unclosed, self._before = [], ""
        try:
            yield from self._read_object(0)
        except MalformedError:
            if self._broke_off:
                self._drop_cut_markup()
            else:
                self._arguments("".join(reversed(self._unclosed)))
            return
        yield from self._attempt(self._expect_next(END))

    def _read_object(self, depth: int) -> Steps[None]:
        self._open("{", "}")
        separator = ""
        while (yield from self._comes_next("})")):
            key = yield from self._read_name()
            self._before = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            yield from self._read_value(depth + 1)
            separator = ", "

    def _read_list(self, depth: int) -> Steps[None]:
        self._open("[", "]")
        separator = ""
        while (yield from self._comes_next("]")):
            self._before = separator
            yield from self._read_value(depth + 1)
            separator = ", "

    def _open(self, begin: str, end: str) -> None:
        self._skip(1)
        self._put(begin)
        self._unclosed.append(end)

    def _comes_next(self, ends: str) -> Steps[bool]:
        """Return whether a member comes next; read the end of the list or object otherwise."""
        yield from self._skip_space()
        while (yield from self._takes(",")):
            yield from self._skip_space()
        character = yield from self._peek()
        if character not in ends:
            return True
        if not character:
            raise MalformedError("end")
        self._skip(1)
        self._put(self._unclosed.pop())
        return False

    def _put(self, text: str) -> None:
        self._arguments(self._before + text)
        self._before = ""

    def _read_name(self) -> Steps[str]:
        pieces: list[str] = []
        self._mark()
        if (yield from self._takes(QUOTE)):
            yield from self._copy_string(pieces)
        elif (yield from self._peek()) == '"':
            pieces.append((yield from self._read_string()))
        else:
            pieces.append((yield from self._read_while(_KEY)).strip())
        yield from self._skip_space()
        if not "".join(pieces) or (yield from self._peek()) not in (":", "="):
            if not self._wanted_more:  # what comes next is text
                self._rewind()
            raise MalformedError("key")
        self._skip(1)
        self._marked = None
        return "".join(pieces)

    def _read_value(self, depth: int) -> Steps[None]:
        if depth > _MAX_DEPTH:
            raise MalformedError("depth")
        yield from self._skip_space()
        if (yield from self._takes(QUOTE)):
            self._put('"')
            self._unclosed.append('"')
            yield from self._copy_string(None)
            self._put(self._unclosed.pop())
            return
        match (yield from self._peek()):
            case "{":
                yield from self._read_object(depth)
            case "[":
                yield from self._read_list(depth)
            case '"':
                self._put(json.dumps((yield from self._read_string()), ensure_ascii=False))
            case _:
                word = yield from self._read_while(_WORD)
                yield from self._peek()  # a word ends before something else
                if not word.strip():
                    raise MalformedError("value")
                self._put(_json_word(word.strip()))

    def _copy_string(self, pieces: list[str] | None) -> Steps[None]:
        """Read a string and its end; emit it as JSON, or add it to `pieces`."""
        while True:
            text = self._rest
            end = text.find(QUOTE)
            shown = text[: end if end >= 0 else len(text) - open_tail(text, (QUOTE,))]
            self._skip(len(shown))
            if pieces is not None:
                pieces.append(shown)
            else:
                self._put(json.dumps(shown, ensure_ascii=False)[1:-1])
            if end >= 0:
                self._skip(len(QUOTE))
                return
            if self._has_run_out():
                raise MalformedError("string")
            yield


def _json_word(word: str) -> str:
    """Return what stands without delimiters as JSON: a number, a constant, or else text."""
    word = _WORDS.get(word, word)
    if _CLIPPED.fullmatch(word):
        word = str(float(word))
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and the infinities are no JSON
