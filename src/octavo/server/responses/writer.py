"""`ItemWriter`: the pieces of an answer as items of a response's output, and as the events that build them."""

from collections.abc import Sequence
from typing import Any, Protocol

from octavo.server.openai.parsers.base import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from octavo.server.openai.replies import TokenRow
from octavo.server.responses.items import covered
from octavo.server.responses.protocol import ReplyItem, ReplyPart
from octavo.server.responses.tools import InputReader, ToolNames

_MESSAGE, _THOUGHT, _CALL, _CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
_PREFIXES = {_MESSAGE: "msg", _THOUGHT: "rs", _CALL: "fc", _CUSTOM: "ctc"}
_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"


class Emit(Protocol):
    """Takes one event; what is in it may change afterwards."""

    def __call__(self, kind: str, /, **fields: Any) -> None:
        """Write an event of a type with its fields."""


class ItemWriter:
    """Writes items one after the other: a piece of another kind ends the item before it.

    `items` is the output so far. A thought is one part of content, or with `shows_summaries` one of its summary; with
    `covers_thoughts` it comes once more in `encrypted_content`.
    """

    def __init__(
        self, name: str, tools: ToolNames, emit: Emit, *, shows_summaries: bool, covers_thoughts: bool
    ) -> None:
        self._name, self._tools, self._emit = name, tools, emit
        self._shows_summaries, self._covers_thoughts = shows_summaries, covers_thoughts
        self.items: list[ReplyItem] = []
        self._is_open = False
        self._arguments: list[str] = []  # of the open call of a function
        self._input = InputReader()  # of the open call of a custom tool
        self._texts: list[str] = []  # of the open part

    def write(self, piece: Delta, rows: Sequence[TokenRow] = ()) -> None:
        """Write one more piece of the answer; `rows` are the logprobs of a text's tokens."""
        match piece:
            case Content(text):
                self._text(text, rows)
            case Reasoning(text):
                self._thought(text)
            case ToolCallStart(_, id_, name):
                self.end()
                tool = self._tools.of_call(name)
                item = self._item(_CUSTOM if tool.is_custom else _CALL)
                item.call_id, item.name = id_, tool.name
                if tool.namespace is not None:
                    item.namespace = tool.namespace
                if tool.is_custom:
                    item.input = ""
                else:
                    item.arguments = ""
                self._arguments, self._input = [], InputReader()
                self._begin(item)
            case ToolCallArguments(_, text):
                if self.items[-1].type == _CALL:
                    self._arguments.append(text)
                    self._about("response.function_call_arguments.delta", delta=text)
                elif new := self._input.push(text):
                    self._about("response.custom_tool_call_input.delta", delta=new)

    def end(self, *, is_cut: bool = False) -> None:
        """End the open item, if there is one."""
        if not self._is_open:
            return
        item = self.items[-1]
        match item.type:
            case "message":
                self._end_text(item)
            case "reasoning":
                self._end_thought(item)
            case "function_call":
                item.arguments = "".join(self._arguments)
                self._about("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
            case _:
                if rest := self._input.finish():
                    self._about("response.custom_tool_call_input.delta", delta=rest)
                item.input = self._input.text
                self._about("response.custom_tool_call_input.done", input=item.input)
        item.status = _INCOMPLETE if is_cut else _COMPLETED
        self._is_open = False
        self._emit("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def say_nothing(self) -> None:
        """Write a text without a word, if there is no item: every answer has one."""
        if not self.items:
            self._text("", ())

    def _text(self, text: str, rows: Sequence[TokenRow]) -> None:
        if not self._is_open or self.items[-1].type != _MESSAGE:
            self.end()
            item = self._item(_MESSAGE)
            item.role, item.content = "assistant", []
            self._begin(item)
            part = ReplyPart(type="output_text", text="", annotations=[], logprobs=[])
            self._part("response.content_part.added", part)
            item.content, self._texts = [part], []
        part = _only_part(self.items[-1].content)
        self._texts.append(text)
        assert isinstance(part.logprobs, list)
        part.logprobs += rows
        if text or rows:
            self._about("response.output_text.delta", content_index=0, delta=text, logprobs=rows)

    def _end_text(self, item: ReplyItem) -> None:
        part = _only_part(item.content)
        part.text = "".join(self._texts)
        self._about("response.output_text.done", content_index=0, text=part.text, logprobs=part.logprobs)
        self._part("response.content_part.done", part)

    def _thought(self, text: str) -> None:
        if not self._is_open or self.items[-1].type != _THOUGHT:
            self.end()
            item = self._item(_THOUGHT)
            item.summary = []
            if not self._shows_summaries:
                item.content = []
            self._begin(item)
            part = ReplyPart(type="summary_text" if self._shows_summaries else "reasoning_text", text="")
            if self._shows_summaries:
                self._about("response.reasoning_summary_part.added", summary_index=0, part=part)
                item.summary = [part]
            else:
                self._part("response.content_part.added", part)
                item.content = [part]
            self._texts = []
        self._texts.append(text)
        if self._shows_summaries:
            self._about("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            self._about("response.reasoning_text.delta", content_index=0, delta=text)

    def _end_thought(self, item: ReplyItem) -> None:
        part = _only_part(item.summary if self._shows_summaries else item.content)
        part.text = "".join(self._texts)
        if self._covers_thoughts:
            item.encrypted_content = covered(part.text)
        if self._shows_summaries:
            self._about("response.reasoning_summary_text.done", summary_index=0, text=part.text)
            self._about("response.reasoning_summary_part.done", summary_index=0, part=part)
        else:
            self._about("response.reasoning_text.done", content_index=0, text=part.text)
            self._part("response.content_part.done", part)

    def _item(self, kind: str) -> ReplyItem:
        return ReplyItem(type=kind, id=f"{_PREFIXES[kind]}_{self._name}_{len(self.items)}", status=_IN_PROGRESS)

    def _begin(self, item: ReplyItem) -> None:
        self.items.append(item)
        self._is_open = True
        self._emit("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _part(self, kind: str, part: ReplyPart) -> None:
        self._about(kind, content_index=0, part=part)

    def _about(self, kind: str, **fields: Any) -> None:
        """Write an event about the last item."""
        self._emit(kind, item_id=self.items[-1].id, output_index=len(self.items) - 1, **fields)


def _only_part(parts: object) -> ReplyPart:
    assert isinstance(parts, list)
    [part] = parts
    assert isinstance(part, ReplyPart)
    return part
