"""Reads one call written as an object: `{"name": "f", "arguments": {...}}`, in whatever order of keys."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from octavo.server.openai.parsers.json_value import copy_json, read_json_text, read_string
from octavo.server.openai.parsers.reader import Emit, MalformedError, Steps, TextReader

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("name", "id", "type")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSink:
    """Where a call goes, and what is asked of it."""

    start: Callable[[str], None]  # takes the name
    arguments: Emit
    allows: Callable[[str], object] = str.isprintable  # whether a name can be that of a call
    is_strict: bool = False  # no tag says that a call comes: other keys, or no arguments, and it is none


def read_json_call(reader: TextReader, sink: CallSink) -> Steps[bool]:
    """Read the object that begins here. Arguments behind the name are handed on as they come.

    Returns whether they were whole; if not, what is wrong with them comes next.

    Raises:
        MalformedError: when it is no call; never after `sink.start`.
    """
    yield from reader.expect("{")
    name: str | None = None
    arguments: str | None = None
    while True:
        key = yield from _read_key(reader, sink)
        if key == "name":
            name = yield from _read_name(reader, sink)
        elif key not in ARGUMENT_KEYS:
            yield from read_json_text(reader)
        elif name is not None and (yield from reader.peek()) == "{":
            return (yield from _stream_arguments(reader, sink, name))
        else:
            arguments = yield from read_json_text(reader)
        if not (yield from _has_more_keys(reader)):
            break
    if name is None:
        raise MalformedError("name")
    text = _arguments_text(arguments, sink.is_strict)
    sink.start(name)
    sink.arguments(text)
    return True


def _stream_arguments(reader: TextReader, sink: CallSink, name: str) -> Steps[bool]:
    sink.start(name)
    if not (yield from copy_json(reader, sink.arguments)):
        return False
    reader.mark()
    try:
        while (yield from _has_more_keys(reader)):
            yield from _read_key(reader, sink)
            yield from read_json_text(reader)
    except MalformedError:
        reader.rewind()  # the call is complete; what is odd about its end stays in the text
    reader.unmark()
    return True


def _read_key(reader: TextReader, sink: CallSink) -> Steps[str]:
    yield from reader.skip_space()
    key = yield from read_string(reader)
    if sink.is_strict and key not in (*ARGUMENT_KEYS, *OTHER_KEYS):
        raise MalformedError(key)
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    return key


def _read_name(reader: TextReader, sink: CallSink) -> Steps[str]:
    name = yield from read_string(reader)
    if not name or not name.isprintable() or not sink.allows(name):
        raise MalformedError("name")
    return name


def _has_more_keys(reader: TextReader) -> Steps[bool]:
    yield from reader.skip_space()
    if (yield from reader.takes(",")):
        return True
    yield from reader.expect("}")
    return False


def _arguments_text(arguments: str | None, are_needed: bool) -> str:
    """Return the arguments as the text of an object: some models write the object as a string, or leave it out."""
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
    return str(text)
