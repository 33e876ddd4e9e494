"""The harmony format of gpt-oss: one answer is several messages, each with a header that says what it is.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends in `<|start|>assistant`. A message to a tool of the request is a call, on whatever channel and with the
recipient before or after it; other messages on the channel `analysis` are reasoning, all others content. Models write
headers with mistakes at a temperature of 1: what is known of a header decides, and what follows it is never lost.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.server.openai.parsers.base import Emit, Reasoning, Steps, open_tail
from octavo.server.openai.parsers.json_calls import JsonCallParser
from octavo.server.openai.parsers.tool_calls import MIN_PART, Schemas, json_tag
from octavo.server.openai.parsers.wrappers import ReasoningFormat
from octavo.structured_output import StructuralTag
from octavo.tokenizer.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_ANALYSIS, _FINAL = "analysis", "final"
_PREFIX = "functions."
_MAX_HEADER = 256  # characters; what is longer is text
_MAX_MARK = max(map(len, _MARKS))
_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, f"to={_PREFIX}")  # of a header, after white space
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_HEADER_END = re.compile(
    "|".join(map(re.escape, (MESSAGE, END, CALL, RETURN))) + rf"|(?<=.){re.escape(START)}", re.DOTALL
)
_RECIPIENT = re.compile(r"to=([\w.\-]*)")
_NAMED = re.compile("analysis|commentary|final")
# What a header without its end consists of; then comes the text of the message.
_WORDS = re.compile(
    r"(?:\s|<\|(?:start|channel|constrain)\|>|to=[\w.\-]+|(?:assistant|analysis|commentary|final|json|code)\b)*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HarmonyFormat(ReasoningFormat):
    """Where an answer starts: in a header, or within a message."""

    begin: str = f"{CHANNEL}{_ANALYSIS}{MESSAGE}"
    end: str = f"{END}{START}assistant"
    answer_begin: str = f"{CHANNEL}{_FINAL}{MESSAGE}"

    @property
    def marks(self) -> tuple[str, ...]:
        return _MARKS

    @property
    def tokens(self) -> tuple[str, ...]:
        return START, CHANNEL, MESSAGE, END

    def starts_inside(self, prompt: str) -> bool | None:
        header, is_ended, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        if not is_ended:
            return False
        return True if _channel(header) == _ANALYSIS else None

    def continues_inside(self, text: str) -> bool | None:
        return None


class HarmonyParser(JsonCallParser):
    """Parses whole answers: reasoning, content and a call, with which the answer ends."""

    markers = _MARKS
    marks_names = False
    calls_once = True
    answer_begin = HarmonyFormat().answer_begin

    def __init__(
        self,
        schemas: Schemas,
        draw: Callable[[], bytes] | None = None,
        max_calls: int | None = None,
        *,
        starts_inside: bool | None = False,
    ) -> None:
        """`starts_inside`: the answer starts inside reasoning; None: inside content; False: in a header."""
        super().__init__(schemas, draw, max_calls)
        self._first = {True: _ANALYSIS, None: _FINAL}.get(starts_inside)
        self._texts = {True: "", False: ""}  # what separates the next message from those before: of reasoning, content
        self._header: str | None = "" if self._first is None else None  # of the tokens counted; None: within a message
        self._counts = bool(starts_inside)
        self.num_tokens = 0  # of reasoning, without headers

    @classmethod
    def tag(cls, name: str, schema: Mapping[str, object]) -> StructuralTag:
        """The order of a header is that in which models write it; chat templates put the recipient first."""
        begin = f"{CHANNEL}commentary to={_PREFIX}{name} {CONSTRAIN}json{MESSAGE}"
        return json_tag(begin, schema, "", trigger=begin)

    def count_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Count the tokens of reasoning among those of text that was read."""
        for token_id in token_ids:
            text = tokenizer.token_text(token_id)
            if self._header is not None and text == MESSAGE:
                self._counts, self._header = self._is_reasoning(self._header), None
            elif self._header is not None:
                self._header += text
            elif text in _MARKS:
                self._header = text if text in (START, CHANNEL) else ""
            else:
                self.num_tokens += self._counts

    def _is_reasoning(self, header: str) -> bool:
        return _channel(header) == _ANALYSIS and self._tool(header) is None

    def _tool(self, header: str) -> str | None:
        """Return the tool of the request that a header names."""
        found = _RECIPIENT.findall(header)
        names = (found[-1], found[-1].removeprefix(_PREFIX)) if found else ()
        return next((name for name in names if name in self._schemas), None)

    def _read(self) -> Steps[None]:
        if self._first is not None:
            yield from self._read_text(is_reasoning=self._first == _ANALYSIS)
        while (yield from self._peek()):
            header = yield from self._read_header()
            if (name := self._tool(header)) is not None:
                yield from self._read_call(name)
            else:
                yield from self._read_text(is_reasoning=self._is_reasoning(header))

    def _read_header(self) -> Steps[str]:
        """Read the header that comes next, empty if text does; what follows is the text of the message."""
        while True:
            text = self._rest
            begun = text.lstrip()
            if not begun.startswith(_BEGINS):
                if not any(mark.startswith(begun) for mark in _BEGINS) or self._has_run_out():
                    return ""
                yield
                continue
            found = _HEADER_END.search(text)
            if found is not None and found.start() <= _MAX_HEADER:
                header = text[: found.start()]
                is_whole = found[0] == MESSAGE
                self._skip(found.end() if is_whole else _end_of_words(header))
                return header
            if len(text) >= _MAX_HEADER + _MAX_MARK or self._has_run_out():
                if self._broke_off and found is None:
                    self._drop_cut_markup()
                    return ""
                header = text[: _end_of_words(text[:_MAX_HEADER])]
                self._skip(len(header))
                return header
            yield

    def _read_call(self, name: str) -> Steps[None]:
        self._start(name)
        yield from self._skip_space()
        if (yield from self._peek()) == "{":
            is_complete = yield from self._copy_json(self._arguments)
        elif is_complete := self._rest.startswith("<") or not (self._rest or self._is_cut):
            self._arguments("{}")
        if is_complete:
            yield from self._skip_space()
        yield from self._copy_message(self._content if is_complete else self._arguments)

    def _read_text(self, *, is_reasoning: bool) -> Steps[None]:
        before = self._texts[is_reasoning]

        def emit(text: str) -> None:
            nonlocal before
            if text:
                self._deltas.append(Reasoning(before + text)) if is_reasoning else self._content(before + text)
                self._texts[is_reasoning], before = "\n\n", ""

        yield from self._copy_message(emit)

    def _copy_message(self, emit: Emit) -> Steps[None]:
        """Emit the text of a message; read its end, but not the beginning of another one. Stray tokens are dropped."""
        while True:
            text = self._rest
            found = _MARK.search(text)
            if found is not None:
                emit(text[: found.start()])
                is_next = found[0] in (START, CHANNEL)
                self._skip(found.start() if is_next else found.end())
                if found[0] not in (MESSAGE, CONSTRAIN):
                    return
                continue
            num_open = open_tail(text, _MARKS)
            if self._is_closed and not (self._is_cut and num_open >= MIN_PART):
                num_open = 0
            emit(text[: len(text) - num_open])
            self._skip(len(text) - (0 if self._is_closed else num_open))
            if self._is_closed:
                return
            yield


def _channel(header: str) -> str | None:
    """Return the channel that a header names, the last if there are several."""
    _, has_channel, rest = _RECIPIENT.sub("", header).partition(CHANNEL)
    found = _NAMED.findall(rest) if has_channel else ()
    return found[-1] if found else None


def _end_of_words(text: str) -> int:
    found = _WORDS.match(text)
    return 0 if found is None else found.end()
