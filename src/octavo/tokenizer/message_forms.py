"""`MessageForms`: what one chat template wants for an absent text, and for the arguments of a call.

Clients send null beside calls. Some templates test for it (`content is none`) and write no calls otherwise, some
concatenate and need text, some write whatever they are given. Most read arguments as an object, some as JSON text.
Each kind of message is tried once per template, in every form; the first that shows most is taken.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Message = Mapping[str, object]
Write = Callable[[Sequence[Message], bool], str | None]  # messages, with tools -> the prompt; None: it fails

_CONTENTS: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})  # the first is what transformers passes
_ROLES = ("assistant", "tool", "function", "ipython")  # roles are users' words: no more of them are tried
_CALL_ID = "abcdefghi"  # of nine letters, as Mistral's templates require
_CALL_NAME = "octavo_call"
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": _CALL_NAME, "arguments": {"octavo_key": "x"}},
}
_BADLY_WRITTEN = ("None", "'octavo_key'", '\\"octavo_key')  # a null, an object as Python writes it, JSON within JSON
_USER: Message = {"role": "user", "content": "x"}
_RESULT: Message = {"role": "tool", "tool_call_id": _CALL_ID, "content": "x"}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of one kind of message."""

    absent: Message  # the fields that stand for absent text
    arguments_as_text: bool

    def of(self, message: Message) -> dict[str, object]:
        """Return the message in this form."""
        plain = dict(message) if "content" in message else {**message, **self.absent}
        if self.arguments_as_text and isinstance(calls := plain.get("tool_calls"), list):
            plain["tool_calls"] = [_with_text(call) for call in calls]
        return plain


_FORMS = tuple(MessageForm(absent, as_text) for as_text in (False, True) for absent in _CONTENTS)
# Some clients send empty text beside calls: it stays so unless the template then writes no calls.
_FORMS_OF_EMPTY = tuple(MessageForm(absent, as_text) for as_text in (False, True) for absent in reversed(_CONTENTS))


class MessageForms:
    """The forms for one template, found on first use."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._found: dict[tuple[str, bool, bool, bool, bool], MessageForm] = {}

    def apply(self, messages: Sequence[Message], *, with_tools: bool) -> list[Message]:
        """Return messages, which hold no nulls, as the template reads them."""
        return [self._apply(message, with_tools) for message in messages]

    def _apply(self, message: Message, with_tools: bool) -> Message:
        has_text, has_calls = "content" in message, bool(message.get("tool_calls"))
        if (has_text and not has_calls) or message["role"] not in _ROLES:  # nearly always
            return message
        if message.get("content") == "":
            plain = {key: value for key, value in message.items() if key != "content"}
            return self._form(str(message["role"]), False, True, with_tools, was_empty=True).of(plain)
        return self._form(str(message["role"]), has_text, has_calls, with_tools).of(message)

    def _form(
        self, role: str, has_text: bool, has_calls: bool, with_tools: bool, *, was_empty: bool = False
    ) -> MessageForm:
        kind = (role, has_text, has_calls, with_tools, was_empty)
        if kind not in self._found:
            message: dict[str, object] = {"role": role}
            if has_text:
                message["content"] = "x"
            if has_calls:
                message["tool_calls"] = [_CALL]
            self._found[kind] = max(
                _FORMS_OF_EMPTY if was_empty else _FORMS, key=lambda form: self._quality(form.of(message), with_tools)
            )
        return self._found[kind]

    def _quality(self, message: Message, with_tools: bool) -> tuple[bool, bool, bool]:
        """Return whether the template takes a message, writes its call, and writes all of it well: the most is best."""
        conversations: list[list[Message]] = [[_USER, message, _USER]]
        if message["role"] == "tool":
            asks = self._apply({"role": "assistant", "tool_calls": [_CALL]}, with_tools)
            conversations = [[_USER, asks, {**message, "tool_call_id": _CALL_ID}]]
        elif message.get("tool_calls"):
            conversations.insert(0, [_USER, message, _RESULT])
        texts = (self._write(conversation, with_tools) for conversation in conversations)
        text = next((text for text in texts if text is not None), None)
        if text is None:
            return False, False, False
        return True, _CALL_NAME in text, not any(each in text for each in _BADLY_WRITTEN)


def _with_text(call: object) -> object:
    """Return a call with its arguments as JSON text."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
