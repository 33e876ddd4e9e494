"""Calls of OLMo 3, as Python: `<function_calls>` and `</function_calls>` around lines such as `f(a=1, b="x")`."""

from collections.abc import Mapping

from octavo.server.openai.parsers.base import Steps
from octavo.server.openai.parsers.pythonic import PythonicParser, call_rules
from octavo.server.openai.parsers.tool_calls import lark_tag
from octavo.structured_output import StructuralTag

BEGIN, END = "<function_calls>", "</function_calls>"


class OlmoParser(PythonicParser):
    """Parses text with such sections."""

    markers = (BEGIN, END)
    marks_names = True

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag | None:
        rules = call_rules(schema)
        return None if rules is None else lark_tag(f"{BEGIN}{name}(", rules, f"){END}", trigger=BEGIN)

    def _read(self) -> Steps[None]:
        yield from self._read_marked_calls(self._read_section, BEGIN)

    def _read_section(self) -> Steps[None]:
        yield from self._expect_next(BEGIN)
        yield from self._read_calls_until(END, self._read_call)
