"""Calls of Mistral models, after `[TOOL_CALLS]`: a JSON list of `{"name": ..., "arguments": ...}`, or, in newer ones,
`name[ARGS]{...}`, each call with its own marker.

Their chat templates require ids of nine letters and digits.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping

from octavo.server.openai.parsers.base import MalformedError, Steps, copy_rest, read_while
from octavo.server.openai.parsers.json_calls import JsonCallParser, copy_json
from octavo.server.openai.parsers.tool_calls import Schemas, json_rule, json_tag, lark_tag, quoted
from octavo.structured_output import StructuralTag

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[\w.\-]*")
_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def new_mistral_id() -> str:
    """Return a random id of 53 bits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralParser(JsonCallParser):
    """Parses text with calls after markers."""

    markers = (BEGIN, CALL_ID, ARGS)

    def __init__(self, schemas: Schemas, new_id: Callable[[], str] = new_mistral_id) -> None:
        super().__init__(schemas, new_id)

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        return json_tag(f"{BEGIN}[{_opening(name)}", schema, "}]", trigger=BEGIN)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag] | None:
        """Models write several calls in one list."""
        calls = [f"{quoted(_opening(name))} {json_rule(schema)}" for name, schema in schemas.items()]
        return [lark_tag(BEGIN, f'start: " "? "[" call (/, ?/ call)* "]"\ncall: ({" | ".join(calls)}) "}}"')]

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_marked, BEGIN)

    def _read_marked(self) -> Steps[None]:
        yield from self._reader.expect_next(BEGIN)
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) == "[":
            yield from self._read_list()
        else:
            yield from self._read_named_call()

    def _read_list(self) -> Steps[None]:
        yield from self._read_list_item("[")
        while (yield from self._attempt(self._read_list_item(","))):
            pass
        yield from self._attempt(self._reader.expect_next("]"))

    def _read_list_item(self, before: str) -> Steps[None]:
        yield from self._reader.expect_next(before)
        yield from self._reader.skip_space()
        yield from self._read_json_call()

    def _read_named_call(self) -> Steps[None]:
        reader = self._reader
        name = yield from read_while(reader, _WORD)
        call_id = (yield from read_while(reader, _WORD)) if (yield from reader.takes(CALL_ID)) else None
        has_args = yield from reader.takes(ARGS)
        yield from reader.skip_space()
        following = yield from reader.peek()
        is_known = following == "{" or (has_args and reader.broke_off)
        if not (is_known and name in self._schemas):
            raise MalformedError("call")
        self._start(name, call_id)
        if not (yield from copy_json(reader, self._arguments)):
            yield from copy_rest(reader, self._arguments)


class MistralArgsParser(MistralParser):
    """Newer models, which write calls with `[ARGS]`; both formats are parsed."""

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        return json_tag(f"{BEGIN}{name}{ARGS}", schema, "", trigger=BEGIN)

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag] | None:
        """Each call has a marker of its own."""
        return None


def _opening(name: str) -> str:
    """Return the text of a call before its arguments."""
    return f'{{"name": {json.dumps(name)}, "arguments": '
