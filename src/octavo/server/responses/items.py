"""The input items of a Responses request as messages of a chat.

A turn of the assistant may be several items: a thought, a text, calls. In a chat they are one message.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.server.http.errors import bad_request
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import ChatMessage, ContentPart, FunctionCall, ImageUrl, ToolCall
from octavo.server.openai.translation import (
    BETWEEN,
    Conversation,
    Placed,
    Result,
    Translated,
    missing,
    required,
    said_by_assistant,
    said_by_user,
    unsupported,
)
from octavo.server.responses.protocol import CallItem, MessageItem, OutputItem, Part, ReasoningItem
from octavo.server.responses.tools import ToolNames, converted, custom_arguments

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SYSTEM = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM)
_CALL, _OUTPUT = "_call", "_call_output"  # the ends of the types of all calls, and of what they return
_OWN = "octavo:"  # the beginning of a thought in our own cover
_COMMON = ("type", "id", "call_id", "status")  # fields of all calls
_MAX_SHOWN = 60

PlacedItem = tuple[str, Mapping[str, Any]]  # an item and its path in the request


@dataclass(slots=True)
class _Turn:
    """Items of the assistant, one after the other."""

    path: str
    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> ChatMessage:
        return said_by_assistant(self.texts, BETWEEN.join(self.thoughts), self.calls)


class ItemReader:
    """Adds items to a conversation, in order."""

    def __init__(self, conversation: Conversation, names: ToolNames, warn: Warn, *, takes_images: bool) -> None:
        self._conversation, self._names, self._warn = conversation, names, warn
        self._takes_images = takes_images
        self._turn: _Turn | None = None
        self._images: list[Placed] = []  # of results, until the last of them
        self._leading: list[str] | None = []  # instructions so far; None: something else has been said

    def read(self, items: Sequence[PlacedItem]) -> None:
        """Read items to the end of the conversation. Raises ApiError, 400: names a part that has no meaning here."""
        for path, item in items:
            self._read(item, path)
        self._end_turn()
        self._end_results()
        self._end_instructions()

    def instruct(self, text: str) -> None:
        """Add instructions, which come first, all of them as one message."""
        assert self._leading is not None
        self._leading.append(text)

    def _read(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if not isinstance(kind, str):
            raise missing(f"{path}.type")
        match kind:
            case "message":
                self._message(converted(item, MessageItem, path), path)
            case "reasoning":
                if thought := _thought(converted(item, ReasoningItem, path), path, self._warn):
                    self._assistant(path).thoughts.append(thought)
            case "function_call" | "custom_tool_call":
                call = converted(item, CallItem, path)
                is_custom = kind == "custom_tool_call"
                arguments = custom_arguments(required(call.input, f"{path}.input")) if is_custom else call.arguments
                self._call(call.call_id, self._names.in_chat(call.name, call.namespace), arguments, path)
            case _ if kind.endswith(_OUTPUT):
                self._output(converted(item, OutputItem, path), path)
            case _ if kind.endswith(_CALL) and isinstance(item.get("call_id"), str):  # a tool that the client runs
                rest = {name: value for name, value in item.items() if name not in _COMMON and value is not None}
                self._call(item["call_id"], kind.removesuffix(_CALL), rest, path)
            case "additional_tools":  # `tools.py` reads them
                pass
            case _:
                self._warn(f"{path} is left out: an item of the type {kind[:_MAX_SHOWN]!r} says nothing to this server")

    def _message(self, item: MessageItem, path: str) -> None:
        if item.role not in _ROLES:
            raise bad_request(f"{path}.role={item.role[:40]!r}: one of {', '.join(_ROLES)}", f"{path}.role")
        placed = list(_parts(item.content, f"{path}.content"))
        if item.role == "assistant":
            self._assistant(path).texts.append("".join(_only_text(at, part) for at, part in placed))
        elif item.role in _SYSTEM:
            text = BETWEEN.join(_only_text(at, part) for at, part in placed)
            if self._leading is not None:
                self._leading.append(text)
            else:
                self._other(Translated(ChatMessage(role="system", content=text)), path)
        else:
            self._end_turn()
            images, self._images = self._images, []
            self._other(said_by_user([*images, *placed]), path)

    def _call(self, call_id: str, name: str, arguments: str | dict[str, Any] | None, path: str) -> None:
        function = FunctionCall(name=name, arguments=arguments)
        self._assistant(path).calls.append(ToolCall(id=call_id, type="function", function=function))

    def _output(self, item: OutputItem, path: str) -> None:
        self._end_turn()
        self._end_instructions()
        result = Result.of(_output_parts(item.output, f"{path}.output"), self._warn, takes_images=self._takes_images)
        self._images += result.images
        message = ChatMessage(role="tool", tool_call_id=item.call_id, content=result.text)
        self._conversation.add(Translated(message), path)

    def _assistant(self, path: str) -> _Turn:
        """Return the assistant's turn, which begins if there is none."""
        if self._turn is None:
            self._end_instructions()
            self._end_results()
            self._turn = _Turn(path)
        return self._turn

    def _other(self, message: Translated, path: str) -> None:
        self._end_turn()
        self._end_results()
        self._end_instructions()
        self._conversation.add(message, path)

    def _end_turn(self) -> None:
        if self._turn is not None:
            turn, self._turn = self._turn, None
            self._conversation.add(Translated(turn.message()), turn.path)

    def _end_results(self) -> None:
        if self._images:
            images, self._images = self._images, []
            self._conversation.add(said_by_user(images), images[0][0])

    def _end_instructions(self) -> None:
        leading, self._leading = self._leading, None
        if text := BETWEEN.join(each for each in leading or () if each):
            self._conversation.add(Translated(ChatMessage(role="system", content=text)), "instructions")


def covered(thought: str) -> str:
    """Return a thought as clients carry it, who are not to read it; nothing is secret in it from those who do."""
    return _OWN + b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def instructions_text(instructions: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the instructions, which may be messages. Raises ApiError, 400."""
    if instructions is None or isinstance(instructions, str):
        return instructions or ""
    texts = []
    for index, item in enumerate(instructions):
        path = f"instructions[{index}]"
        message = converted(item, MessageItem, path)
        texts += [_only_text(at, part) for at, part in _parts(message.content, f"{path}.content")]
    return BETWEEN.join(texts)


def _thought(item: ReasoningItem, path: str, warn: Warn) -> str:
    """Return a thought; what another provider has encrypted, only as far as there is a summary."""
    for name, parts in (("content", item.content), ("summary", item.summary)):
        placed = ((f"{path}.{name}[{index}]", part) for index, part in enumerate(parts or ()))
        if name == "summary" and (own := _uncovered(item.encrypted_content)) is not None:
            return own
        if text := "".join(_only_text(at, _part(part, at)) for at, part in placed):
            return text
    if item.encrypted_content:
        warn(f"{path} is left out: another server has encrypted it")
    return ""


def _uncovered(text: str | None) -> str | None:
    if text is None or not text.startswith(_OWN):
        return None
    try:
        return b64decode(text[len(_OWN) :], validate=True).decode("utf-8", "replace")
    except ValueError:
        return None


def _parts(content: str | Sequence[Part] | None, path: str) -> Iterator[Placed]:
    if isinstance(content, str):
        yield path, ContentPart(type="text", text=content)
        return
    for index, part in enumerate(content or ()):
        yield f"{path}[{index}]", _part(part, f"{path}[{index}]")


def _output_parts(output: object, path: str) -> Iterator[Placed]:
    """Yield the parts of an output; any JSON that is no list of parts is shown as it is."""
    if isinstance(output, str) or output is None:
        yield path, ContentPart(type="text", text=output or "")
    elif isinstance(output, list) and all(isinstance(each, dict) and "type" in each for each in output):
        for index, each in enumerate(output):
            at = f"{path}[{index}]"
            yield at, _part(converted(each, Part, at), at)
    else:
        yield path, ContentPart(type="text", text=json.dumps(output, ensure_ascii=False))


def _part(part: Part, path: str) -> ContentPart:
    if part.type in _TEXTS:
        return ContentPart(type="text", text=required(part.text, f"{path}.text"))
    match part.type:
        case "refusal":
            return ContentPart(type="text", text=required(part.refusal, f"{path}.refusal"))
        case "input_image" | "computer_screenshot":
            url = required(part.image_url, f"{path}.image_url")
            return ContentPart(type="image_url", image_url=ImageUrl(url=url, detail=part.detail))
        case "input_file":
            return ContentPart(type="text", text=_file_text(part, path))
    raise unsupported(part.type, f"{path}.type", "input_text, output_text, refusal, input_image and input_file")


def _only_text(path: str, part: ContentPart) -> str:
    if part.text is None:
        raise unsupported(part.type, f"{path}.type", "text here")
    return part.text


def _file_text(part: Part, path: str) -> str:
    """Return a text file, under its name."""
    data = required(part.file_data, f"{path}.file_data")
    _, comma, encoded = data.partition(",") if data.startswith("data:") else ("", ",", data)
    try:
        text = b64decode("".join(encoded.split()), validate=True).decode() if comma else ""
    except ValueError:  # UnicodeDecodeError is one
        text = ""
    if not text or "\x00" in text:
        raise bad_request(
            f"{path}.file_data: the text of a file, in base64", f"{path}.file_data", "unsupported_content"
        )
    return f"{part.filename}\n{text}" if part.filename else text


def plain(value: object) -> Any:
    """Return an item of the output as one that a client sends back."""
    return msgspec.to_builtins(value)
