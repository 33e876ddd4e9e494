"""Calls as Python lists: `[f(a=1), g(b="x")]`, of Llama 4, LFM2 and others, optionally between tags.

Values are converted to JSON, so a call is emitted once it is complete. Without a tag, an answer is a call only if it
begins as one and names a tool of the request.

What models write is not quite Python: chat templates show them strings whose quotes and line breaks are not escaped,
arguments have names that Python reserves, numbers begin with zeros. A quote ends a string only where one may end.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.tool_calls import ToolCallParser, json_rule, lark_tag, parameters_of, quoted
from octavo.structured_output import StructuralTag

TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
_SECTION, _SECTION_END = "<function_calls>", "</function_calls>"
_NAME = re.compile(r"[\w.\-]*")
_PLAIN = re.compile(r"[^()\[\]{}\"']*")
_PLAIN_IN_STRING = re.compile(r"[^\\\"']*")
_JSON_NAMES: dict[str, object] = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_AFTER_STRING = ",:)]}"
_ARGUMENT = re.compile(r"\b[A-Za-z_]\w*(?=\s*=(?!=))")
_ZEROS = re.compile(r"(?<![\w.])0+(?=[0-9])")
_RESERVED = "reserved_"  # before the name of an argument that is a keyword of Python
_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r"})


class PythonicParser(ToolCallParser):
    """Parses a list of calls at the beginning of the text or after a tag; what follows it is text."""

    markers = (*TAGS, *TAGS.values())
    separator = "\n"
    writes_json = False
    marks_names = False

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        """Values are JSON, which `keyword_arguments` reads as such."""
        rules = call_rules(schema)
        return None if rules is None else lark_tag(f"[{name}(", rules, ")]")

    def _read(self) -> Steps[None]:
        while True:
            is_list = yield from self._attempt(self._read_item("["))
            if not is_list:
                if not (yield from self._copy_until(tuple(TAGS), self._content)):
                    break
                is_list = yield from self._attempt(self._read_item("["))
            if not is_list:
                self._pass_over(*TAGS)
                continue
            while (yield from self._attempt(self._read_item(","))):
                pass
            if (yield from self._attempt(self._expect_next("]"))):
                yield from self._attempt(self._read_end_tag())
        self._close_text()

    def _read_item(self, before: str) -> Steps[None]:
        yield from self._skip_space()
        if before == "[":
            yield from self._takes_any(TAGS)
            yield from self._skip_space()
        yield from self._expect(before)
        yield from self._read_call()

    def _read_call(self) -> Steps[None]:
        yield from self._skip_space()
        name = yield from self._read_while(_NAME)
        if name not in self._schemas or (yield from self._peek()) != "(":
            raise MalformedError("name")
        try:
            text = yield from self._read_parentheses()
        except MalformedError:
            if self._broke_off:  # the name is all that is known of the call
                self._start(name)
            raise
        arguments = _json_text(keyword_arguments(text))
        self._start(name)
        self._arguments(arguments)

    def _read_end_tag(self) -> Steps[None]:
        yield from self._skip_space()
        if not (yield from self._takes_any(TAGS.values())):
            raise MalformedError("tag")

    def _read_parentheses(self) -> Steps[str]:
        """Return the text of the bracketed expression that begins here, brackets included."""
        pieces: list[str] = []
        awaited: list[str] = []
        while awaited or not pieces:
            plain = _ZEROS.sub("", (yield from self._read_while(_PLAIN)))
            pieces.append(_ARGUMENT.sub(_renamed, plain) if len(awaited) == 1 else plain)
            character = yield from self._peek()
            if character in ('"', "'"):
                pieces.append((yield from self._read_quoted(character)))
                continue
            if character in _CLOSING:
                awaited.append(_CLOSING[character])
            elif not awaited or awaited.pop() != character:
                raise MalformedError("bracket")
            self._skip(1)
            pieces.append(character)
        return "".join(pieces)

    def _read_quoted(self, quote: str) -> Steps[str]:
        quote = quote * 3 if (yield from self._takes(quote * 3)) else quote
        if len(quote) == 1:
            self._skip(1)
        pieces = [quote]
        while True:
            plain = yield from self._read_while(_PLAIN_IN_STRING)
            pieces.append(plain if len(quote) == 3 else plain.translate(_ESCAPES))
            is_end = len(quote) == 3 or (yield from self._peek()) != quote or (yield from self._may_end())
            if is_end and (yield from self._takes(quote)):
                return "".join([*pieces, quote])
            character = yield from self._read_character()
            pieces += ["" if is_end else "\\", character]
            pieces.append((yield from self._read_character()) if character == "\\" else "")

    def _may_end(self) -> Steps[bool]:
        """Return whether a string may end with the quote that comes next."""
        while not (after := self._rest[1:].lstrip()):
            if self._has_run_out():
                return True
            yield
        return after[0] in _AFTER_STRING

    def _read_character(self) -> Steps[str]:
        character = yield from self._peek()
        if not character:
            raise MalformedError("string")
        self._skip(1)
        return character

    def _takes_any(self, tags: Iterable[str]) -> Steps[bool]:
        for tag in tags:
            if (yield from self._takes(tag)):
                return True
        return False


class OlmoParser(PythonicParser):
    """Calls of OLMo 3: `<function_calls>` and `</function_calls>` around lines such as `f(a=1, b="x")`."""

    markers = (_SECTION, _SECTION_END)
    marks_names = True

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        rules = call_rules(schema)
        return None if rules is None else lark_tag(f"{_SECTION}{name}(", rules, f"){_SECTION_END}", trigger=_SECTION)

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_section, _SECTION)

    def _read_section(self) -> Steps[None]:
        yield from self._expect_next(_SECTION)
        yield from self._read_calls_until(_SECTION_END, self._read_call)


def call_rules(schema: Mapping[str, object]) -> str | None:
    """Return the rules in Lark for what stands between the parentheses of a call; None: they cannot say it."""
    parameters = parameters_of(schema)
    if parameters is None or not all(each.name.isidentifier() and not iskeyword(each.name) for each in parameters):
        return None
    rules = [f"a{index}: {quoted(f'{each.name}=')} {json_rule(each.schema)}" for index, each in enumerate(parameters)]
    names = [f"a{index}" for index in range(len(parameters))]
    start = f"start: {list_of(names, sum(each.is_required for each in parameters), ', ')}"
    return "\n".join([start, *rules])


def _json_text(arguments: dict[str, object]) -> str:
    """Return the arguments as JSON, which has no infinities, and as UTF-8, which has no lone surrogates."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:
        raise MalformedError("value") from error
    return text


def list_of(names: Sequence[str], num_required: int, separator: str) -> str:
    """Return the expression of the rules in `names`, separated; the first are required."""
    between = quoted(separator)
    optional = [f"({between} {name})?" for name in names[num_required:]]
    if num_required:
        return f" {between} ".join(names[:num_required]) + " " + " ".join(optional)
    starts = [" ".join([name, *optional[index + 1 :]]) for index, name in enumerate(names)]
    return f"({' | '.join(starts)})?" if starts else '""'


def keyword_arguments(text: str) -> dict[str, object]:
    """Return the arguments in `text`, such as `(a=1, b=["x"])`, by name, as JSON values."""
    try:
        with warnings.catch_warnings(action="ignore"):  # models write unknown escapes
            call = ast.parse(f"f{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise MalformedError("argument without a name")
        return {_own_name(keyword.arg): _argument(f"f{text}", keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError("arguments") from error


def _renamed(name: re.Match[str]) -> str:
    return f"{_RESERVED}{name[0]}" if iskeyword(name[0]) else name[0]


def _own_name(name: str | None) -> str:
    known = key_of(name)
    own = known.removeprefix(_RESERVED)
    return own if iskeyword(own) else known


def _argument(source: str, node: ast.expr) -> object:
    """Return the value of one argument. Text that is JSON is read as such: the two differ in escapes."""
    try:
        return json.loads(ast.get_source_segment(source, node) or "")
    except ValueError:
        return value_of(node)


def literal_value(text: str) -> object:
    """Return the value of a text such as `{'a': [True, None]}`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # models write unknown escapes
            return value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError("value") from error


def value_of(node: ast.expr) -> object:
    """Return the value of a literal. Raises MalformedError for any other expression."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key_of(value_of(key) if key is not None else None) for key in keys]
            return dict(zip(names, map(value_of, values), strict=True))
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise MalformedError("value")


def key_of(name: object) -> str:
    if not isinstance(name, str):
        raise MalformedError("key")
    return name
