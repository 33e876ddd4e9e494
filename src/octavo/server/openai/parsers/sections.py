"""Formats whose calls stand in a section, each a header and JSON between tokens of their own: DeepSeek, Kimi.

The tokens of the section are optional, as models forget them; the tool has to be one of the request.
"""

from abc import abstractmethod
from typing import ClassVar

from octavo.server.openai.parsers.base import MalformedError, Steps
from octavo.server.openai.parsers.json_calls import JsonCallParser
from octavo.server.openai.parsers.tool_calls import Schemas, lark_tag, quoted
from octavo.structured_output import StructuralTag


class SectionParser(JsonCallParser):
    """The base of these formats."""

    SECTION: ClassVar[str]
    SECTION_END: ClassVar[str]
    CALL: ClassVar[str]
    CALL_END: ClassVar[str]

    @classmethod
    @abstractmethod
    def _call_rule(cls, name: str, schemas: Schemas) -> str:
        """Return the expression in Lark of a call of `name`, between `CALL` and `CALL_END`."""

    @abstractmethod
    def _read_header(self) -> Steps[tuple[str, str | None]]:
        """Read what stands before the arguments; return the name of the tool, and the model's id of the call."""

    @classmethod
    def loose_tags(cls, schemas: Schemas) -> list[StructuralTag]:
        """Models write all calls in one section."""
        calls = " | ".join(cls._call_rule(name, schemas) for name in schemas)
        rules = [
            f"start: call+ {quoted(cls.SECTION_END)}",
            f"call: {quoted(cls.CALL)} ({calls}) {quoted(cls.CALL_END)}",
        ]
        return [lark_tag(cls.SECTION, "\n".join(rules), tokens=cls.markers)]

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_section, self.SECTION, self.CALL)

    def _read_section(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._takes(self.SECTION)
        yield from self._read_calls_until(self.SECTION_END, self._read_call)

    def _read_call(self) -> Steps[None]:
        yield from self._expect_next(self.CALL)
        yield from self._skip_space()
        name, call_id = yield from self._read_header()
        yield from self._skip_space()
        if name not in self._schemas:
            raise MalformedError("name")
        if (yield from self._takes(self.CALL_END)):  # without arguments
            self._start(name, call_id)
            self._arguments("{}")
            return
        if (yield from self._peek()) != "{" and not self._broke_off:
            raise MalformedError("arguments")
        self._start(name, call_id)
        if not (yield from self._copy_json(self._arguments)):
            yield from self._copy_until((self.CALL_END, self.SECTION_END), self._arguments)
        yield from self._attempt(self._read_call_end())

    def _read_call_end(self) -> Steps[None]:
        yield from self._expect_next(self.CALL_END)
