"""Separates a model's reasoning, between two tags at the beginning of its answer, from the answer itself.

White space around a tag belongs to the tag. Many chat templates put the opening tag into the prompt: then the answer
starts inside reasoning. So does one that continues an unfinished thought. Reasoning comes once,
first: later tags are text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.server.openai.parsers.base import Content, Delta, Reasoning
from octavo.server.openai.parsers.reader import GeneratorParser, Steps, copy_until


class ReasoningParser(GeneratorParser):
    """Parses one answer of a model that reasons between `begin` and `end`."""

    def __init__(self, begin: str, end: str, *, starts_inside: bool, is_continued: bool = False) -> None:
        super().__init__()
        self._is_continued = is_continued  # the prompt ends within the reasoning, whose white space goes on
        self._begin, self._end, self._starts_inside = begin, end, starts_inside
        self.has_reasoning: bool | None = None  # None until known
        self._is_over = False  # the rest is the answer

    def push(self, text: str) -> Sequence[Delta]:
        if self._is_over:
            return [Content(text)] if text else []
        return super().push(text)

    def _read(self) -> Steps[None]:
        reader = self._reader
        if self._starts_inside and self._is_continued:
            self.has_reasoning = True
            yield from self._copy_reasoning()
        else:
            yield from self._read_beginning()
        self._is_over = True
        self._content(reader.rest)
        reader.skip(len(reader.rest))

    def _read_beginning(self) -> Steps[None]:
        reader = self._reader
        reader.mark()
        yield from reader.skip_space()
        begins = yield from reader.takes(self._begin)  # some models repeat the tag that the prompt ended in
        self.has_reasoning = begins or self._starts_inside
        if self.has_reasoning:
            reader.unmark()
            yield from reader.skip_space()
            yield from self._copy_reasoning()
        else:
            reader.rewind()

    def _copy_reasoning(self) -> Steps[None]:
        reader = self._reader
        if not (yield from copy_until(reader, (self._end,), self._reasoning)):
            self._reasoning(reader.rest)
            reader.skip(len(reader.rest))
            return
        yield from reader.expect_next(self._end)
        yield from reader.skip_space()

    def _reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(Reasoning(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """How one family of models marks its reasoning."""

    begin: str
    end: str
    always_starts_inside: bool = False  # with or without an opening tag

    def starts_inside(self, prompt: str) -> bool | None:
        """Return whether the answer to `prompt` starts inside reasoning; None if the prompt has closed it already."""
        ending = prompt.rstrip()
        if ending.endswith(self.end):
            return None
        return self.always_starts_inside or ending.endswith(self.begin)

    def continues_inside(self, text: str) -> bool | None:
        """Return whether an answer that begins with `text` goes on inside reasoning; None if it has closed it already.

        False: it has not begun any.
        """
        if self.end in text:
            return None
        return text.lstrip().startswith(self.begin)

    def parser(self, *, starts_inside: bool, is_continued: bool = False) -> ReasoningParser:
        """Return the parser of one answer, or of the rest of one that the prompt begins."""
        return ReasoningParser(self.begin, self.end, starts_inside=starts_inside, is_continued=is_continued)
