"""`Chain`: one parser reads what another left as content."""

from collections.abc import Sequence

from octavo.server.openai.parsers.base import Content, Delta, OutputParser


class Chain:
    """`first` separates its part, `second` reads on in the rest: reasoning first, then tool calls."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> Sequence[Delta]:
        """Read on; see `OutputParser`."""
        return self._pass_on(self._first.push(text))

    def finish(self) -> Sequence[Delta]:
        """Read the end; see `OutputParser`."""
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    def _pass_on(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        result: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                result.extend(self._second.push(delta.text))
            else:
                result.append(delta)
        return result
