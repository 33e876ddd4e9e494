"""Calls of Mistral models, after `[TOOL_CALLS]`: a JSON list of `{"name": ..., "arguments": ...}`, or, in newer ones,
`name[ARGS]{...}`, each call with its own marker.

Their chat templates require ids of nine letters and digits.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.json_calls import JsonCallParser
from octavo.server.openai.parsers.tool_calls import Schemas, json_rule, json_tag, lark_tag, quoted
from octavo.structured_output import StructuralTag

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[\w.\-]*")
_ALPHABET = string.ascii_letters + string.digits


class MistralParser(JsonCallParser):
    """Parses text with calls after markers."""

    markers = (BEGIN, CALL_ID, ARGS)

    @staticmethod
    def new_call_id() -> str:
        """Return 53 random bits."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

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
        yield from self._expect_next(BEGIN)
        yield from self._skip_space()
        if (yield from self._peek()) == "[":
            yield from self._read_list()
        else:
            yield from self._read_named_call()

    def _read_list(self) -> Steps[None]:
        yield from self._read_list_item("[")
        while (yield from self._attempt(self._read_list_item(","))):
            pass
        yield from self._attempt(self._expect_next("]"))

    def _read_list_item(self, before: str) -> Steps[None]:
        yield from self._expect_next(before)
        yield from self._skip_space()
        yield from self._read_json_call()

    def _read_named_call(self) -> Steps[None]:
        name = yield from self._read_while(_WORD)
        call_id = (yield from self._read_while(_WORD)) if (yield from self._takes(CALL_ID)) else None
        has_args = yield from self._takes(ARGS)
        yield from self._skip_space()
        is_known = (yield from self._peek()) == "{" or (has_args and self._broke_off)
        if not (is_known and name in self._schemas):
            raise MalformedError("call")
        self._start(name, call_id)
        if not (yield from self._copy_json(self._arguments)):
            yield from self._copy_rest(self._arguments)


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
    return f'{{"name": {json.dumps(name)}, "arguments": '
