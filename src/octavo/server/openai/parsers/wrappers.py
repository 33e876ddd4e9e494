"""Parsers around that of a format: reasoning, special tokens, a limit of calls, stop strings in its content."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.engine.stop_strings import StopStringMatcher
from octavo.server.openai.parsers.base import Content, Delta, OutputParser, Reasoning, Steps, StreamParser
from octavo.tokenizer.tokenizer import Tokenizer


class Chain(OutputParser):
    """`second` parses what `first` leaves as content: reasoning first, then tool calls."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> Sequence[Delta]:
        return self._pass_on(self._first.push(text))

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return [*self._pass_on(self._first.finish(is_cut=is_cut)), *self._second.finish(is_cut=is_cut)]

    @property
    def num_held(self) -> int:
        return self._first.num_held + self._second.num_held

    def _pass_on(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        parsed = (self._second.push(each.text) if isinstance(each, Content) else [each] for each in deltas)
        return [delta for some in parsed for delta in some]


class SpecialTokenFilter(OutputParser):
    """Drops the special tokens in `hidden`, of which there may be thousands, from text.

    Usually the detokenizer does that. But the markers of calls or reasoning may be special tokens (`[TOOL_CALLS]`,
    `<|python_tag|>`): then the engine emits all special tokens, and this filter, before the parsers, drops those that
    are not markers. Of overlapping matches the first wins, of those with the same start the longest.
    """

    def __init__(self, hidden: Collection[str]) -> None:
        self._first_characters = frozenset(token[0] for token in hidden)
        self._prefixes = frozenset(token[:size] for token in hidden for size in range(1, len(token) + 1))
        self._longest = max(map(len, hidden), default=0)
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))) or r"\Z.")
        self._held = ""

    def push(self, text: str) -> Sequence[Delta]:
        if not self._held and self._first_characters.isdisjoint(text):  # nearly always
            return [Content(text)] if text else []
        return self._filtered(self._held + text, is_last=False)

    def finish(self, *, is_cut: bool = False) -> Sequence[Delta]:
        return self._filtered(self._held, is_last=True)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def _filtered(self, text: str, is_last: bool) -> Sequence[Delta]:
        sizes = range(0 if is_last else min(self._longest, len(text)), 0, -1)
        num_open = next(
            (size for size in sizes if text[-size:] in self._prefixes), 0
        )  # may become a token, or a longer one
        shown: list[str] = []
        position = 0
        while (found := self._hidden.search(text, position)) and found.start() < len(text) - num_open:
            shown.append(text[position : found.start()])
            position = found.end()
        shown_end = max(position, len(text) - num_open)
        shown.append(text[position:shown_end])
        self._held = text[shown_end:]
        joined = "".join(shown)
        return [Content(joined)] if joined else []


class ReasoningParser(StreamParser):
    """Separates a model's reasoning, between two tags at the beginning of its answer, from the answer itself.

    White space around a tag belongs to the tag. Many chat templates put the opening tag into the prompt: then the
    answer starts inside reasoning. So does one that continues an unfinished thought. Reasoning comes once, first: later
    tags are text, but for an end tag that is written twice. One of `calls` ends a thought that the model forgot to end.
    """

    def __init__(
        self,
        begin: str,
        end: str,
        *,
        starts_inside: bool,
        is_continued: bool = False,
        calls: Sequence[str] = (),
        label: str = "",
    ) -> None:
        super().__init__()
        self._label = label  # after the opening tag, and part of it
        self._ends = (end, *calls)
        self._is_continued = is_continued  # the prompt ends within the reasoning, whose white space goes on
        self._begin, self._end, self._starts_inside = begin, end, starts_inside
        self.has_reasoning: bool | None = None  # None until known
        self._is_over = False  # the rest is the answer
        self._num_tokens = 0
        self._tail: bytes | None = b""  # of the tokens counted; None: with the end of the reasoning

    def push(self, text: str) -> Sequence[Delta]:
        if self._is_over:
            return [Content(text)] if text else []
        return super().push(text)

    def _read(self) -> Steps[None]:
        if self._starts_inside and self._is_continued:
            self.has_reasoning = True
        else:
            yield from self._read_beginning()
        if self.has_reasoning:
            if (yield from self._copy_until(self._ends, self._reasoning)):
                yield from self._skip_space()
                while (yield from self._takes(self._end)):
                    yield from self._skip_space()
            else:
                self._reasoning(self._rest)
                self._skip(len(self._rest))
        self._is_over = True
        self._content(self._rest)
        self._skip(len(self._rest))

    def count_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Count the tokens of text that was read, up to and including what ends the reasoning."""
        if self._tail is None or self.has_reasoning is False:
            return
        ends = [end.encode() for end in self._ends]
        longest = max(map(len, ends))
        for token_id in token_ids:
            self._num_tokens += 1
            self._tail += tokenizer.token_bytes(token_id)
            if any(end in self._tail for end in ends):
                self._tail = None
                return
            self._tail = self._tail[-longest:]

    @property
    def num_tokens(self) -> int:
        """Reasoning tokens so far; 0 for an answer without reasoning."""
        return self._num_tokens if self.has_reasoning else 0

    def _read_beginning(self) -> Steps[None]:
        self._mark()
        yield from self._skip_space()
        begins = yield from self._takes(self._begin)  # some models repeat the tag that the prompt ended in
        self.has_reasoning = begins or self._starts_inside
        if not self.has_reasoning:
            self._rewind()
            return
        self._marked = None
        yield from self._skip_space()
        if begins and self._label and (yield from self._takes(self._label)):
            yield from self._skip_space()

    def _reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(Reasoning(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """How one family of models marks its reasoning."""

    begin: str
    end: str
    always_starts_inside: bool = False  # with or without an opening tag
    answer_begin: str = ""  # what has to come before the answer itself
    label: str = ""  # the name of a channel, after `begin`

    @property
    def marks(self) -> tuple[str, ...]:
        """What a parser has to see of it."""
        return self.begin, self.end

    @property
    def tokens(self) -> tuple[str, ...]:
        """What has to be single tokens of the model for reasoning before a constrained answer."""
        return self.begin, self.end

    def starts_inside(self, prompt: str) -> bool | None:
        """Return whether the answer to `prompt` starts inside reasoning; None if the prompt has closed it already."""
        ending = prompt.rstrip()
        if ending.endswith(self.end):
            return None
        return self.always_starts_inside or ending.endswith((self.begin, self.begin + self.label))

    def continues_inside(self, text: str) -> bool | None:
        """Return whether an answer is inside reasoning after `text`; None: it has closed it; False: it began none."""
        if self.end in text:
            return None
        return text.lstrip().startswith(self.begin)


class ContentStops:
    """Finds stop strings in the content of an answer, with a parser of its own; a `StopFinder` of the engine.

    Reasoning, and the markup and arguments of calls, are not searched. The engine's frontend asks after every token, so
    an answer ends at the same token whether it is streamed or whole.

    It passes on text as the model wrote it, to be parsed again, but keeps back what the parser has not read yet and
    what may still become a stop string. A stop string does not reach across a call.
    """

    def __init__(self, parser: OutputParser, stop: Sequence[str], include_in_output: bool) -> None:
        self._parser, self._include = parser, include_in_output
        self._matcher = StopStringMatcher(stop, include_in_output=False)
        self._text = ""  # not passed on yet
        self._num_open = 0  # characters at the end of the content so far that may begin a stop string

    def skip(self, delta: str) -> str:
        """Add text that cannot end the answer, as it has too few tokens; return what may be shown."""
        self._text += delta
        self._parser.push(delta)
        return self._release(len(self._text) - self._parser.num_held)

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add text; return what may be shown, and the stop string that ends the answer, if any."""
        shown = ""
        for character in delta:  # so that the place of the content in the text is known, however it was cut
            self._text += character
            text, stop = self._search(self._parser.push(character))
            shown += text
            if stop is not None:
                return shown, stop
        return shown, None

    def finish(self, *, is_cut: bool, may_stop: bool) -> tuple[str, str | None]:
        """Return the rest, which may hold a stop string that the parser had not read; the model has ended."""
        shown, stop = self._search(self._parser.finish(is_cut=is_cut)) if may_stop else ("", None)
        return (shown, stop) if stop is not None else (shown + self._release(len(self._text)), None)

    def _search(self, deltas: Sequence[Delta]) -> tuple[str, str | None]:
        for delta in deltas:
            if not isinstance(delta, Content):
                self._matcher.flush()
                self._num_open = 0
                continue
            shown, stop = self._matcher.push(delta.text)
            if stop is not None:
                after = self._num_open + len(delta.text) - len(shown) - len(stop)
                start = max(0, len(self._text) - self._parser.num_held - after - len(stop))
                if not self._text.startswith(stop, start):  # a special token that the parser drops may shift it
                    found = self._text.find(stop)
                    start = start if found < 0 else found
                return self._release(start + len(stop) if self._include else start), stop
            self._num_open += len(delta.text) - len(shown)
        num_kept = self._parser.num_held + (0 if self._include else self._num_open)
        return self._release(len(self._text) - num_kept), None

    def _release(self, size: int) -> str:
        shown, self._text = self._text[:size], self._text[size:]
        return shown
