"""Separates what a model thinks, between two tags at the beginning of its answer, from the answer itself.

White space at either side of a tag belongs to the tag. Many chat templates put the opening tag into the prompt: then
the answer starts inside. Thinking happens once, first: a tag further on is text.
"""

from collections.abc import Sequence

from octavo.server.openai.parsers.base import Content, Delta, Reasoning
from octavo.server.openai.parsers.reader import Steps, TextReader, copy_until


class ReasoningParser:
    """One answer of a model that thinks between `begin` and `end`."""

    def __init__(self, begin: str, end: str, *, starts_inside: bool) -> None:
        self._begin, self._end, self._starts_inside = begin, end, starts_inside
        self.has_thoughts: bool | None = None  # None until that is clear
        self._is_over = False  # all that is still to come is the answer
        self._reader = TextReader()
        self._deltas: list[Delta] = []
        self._steps = self._read()

    def push(self, text: str) -> Sequence[Delta]:
        """Read on; see `OutputParser`."""
        if self._is_over:
            return [Content(text)] if text else []
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> Sequence[Delta]:
        """Read the end; see `OutputParser`."""
        self._reader.close()
        return self._advance()

    def _advance(self) -> Sequence[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.mark()
        yield from reader.skip_space()
        begins = yield from reader.takes(self._begin)  # some models repeat the tag that the prompt ended in
        self.has_thoughts = begins or self._starts_inside
        if self.has_thoughts:
            reader.unmark()
            yield from self._read_thoughts()
        else:
            reader.rewind()
        self._is_over = True
        if reader.rest:
            self._deltas.append(Content(reader.rest))

    def _read_thoughts(self) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        if not (yield from copy_until(reader, (self._end,), self._reasoning)):
            self._reasoning(reader.rest)
            reader.skip(len(reader.rest))
            return
        yield from reader.skip_space()
        yield from reader.expect(self._end)
        yield from reader.skip_space()

    def _reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(Reasoning(text))
