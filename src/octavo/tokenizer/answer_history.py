"""Earlier answers in the form that a chat template reads: the field of thoughts, and the number of calls in a message.

Most templates read `reasoning_content` and any number of calls. Those of gpt-oss and LFM2.5 read `thinking`, and that
of gpt-oss writes only the first call of a message and refuses text beside a thought and a call. What a template does
with calls is tried once; the order of what the model said and was told stays the same.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

Message = Mapping[str, object]

_THOUGHT, _OTHER_THOUGHT = "reasoning_content", "thinking"
_READS_OTHER = re.compile(r"""\.thinking\b|\[ ?["']thinking["'] ?\]|["']thinking["'] in\b""")
_RESULTS = ("tool", "function")
_IDS = ("abcdefghi", "jklmnopqr")  # of nine letters, as Mistral's templates require
_CALLS = [
    {"id": id_, "type": "function", "function": {"name": name, "arguments": {"key": "x"}}}
    for id_, name in zip(_IDS, ("octavo_first", "octavo_second"), strict=True)
]
_USER: Message = {"role": "user", "content": "x"}
_ANSWERS: list[Message] = [{"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in _IDS]


class AnswerHistory:
    """What one template does with earlier answers; `write` returns what it writes for a trial, None if it fails."""

    def __init__(self, source: str, write: Callable[[Sequence[Message]], str | None]) -> None:
        self._write = write
        reads_other = _THOUGHT not in source and _READS_OTHER.search(source) is not None
        self.field = _OTHER_THOUGHT if reads_other else _THOUGHT
        self.keeps_thoughts = reads_other or _THOUGHT in source

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation with every answer as the template reads it."""
        if self.field != _THOUGHT:
            messages = [self._renamed(message) for message in messages]
        if any(_num_calls(message) > 1 for message in messages) and self._writes_one_call:
            messages = _one_call_each(messages)
        return [self._without_text(message) for message in messages]

    def _renamed(self, message: Message) -> Message:
        if _THOUGHT not in message:
            return message
        others = {key: value for key, value in message.items() if key != _THOUGHT}
        return {self.field: message[_THOUGHT], **others}

    def _without_text(self, message: Message) -> Message:
        """Put text beside a thought and a call into the thought if the template refuses it."""
        thought, text = message.get(self.field), message.get("content")
        if not (thought and text and _num_calls(message) and isinstance(text, str) and self._refuses_text):
            return message
        others = {key: value for key, value in message.items() if key != "content"}
        return {**others, self.field: f"{thought}\n\n{text}"}

    @cached_property
    def _writes_one_call(self) -> bool:
        text = self._write([_USER, {"role": "assistant", "tool_calls": _CALLS}, *_ANSWERS]) or ""
        return "octavo_first" in text and "octavo_second" not in text

    @cached_property
    def _refuses_text(self) -> bool:
        thought: Message = {"role": "assistant", self.field: "x", "tool_calls": _CALLS[:1]}
        alone, both = ([_USER, each, _ANSWERS[0]] for each in (thought, {**thought, "content": "x"}))
        return self._write(alone) is not None and self._write(both) is None


def _num_calls(message: Message) -> int:
    calls = message.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which each call is a message of its own, with its result after it."""
    result: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            result.append(message)
            continue
        waiting: list[Message] = []
        while position < len(messages) and messages[position].get("role") in _RESULTS:
            waiting.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": message["role"]}
            result.append({**said, "tool_calls": [call]})
            if waiting:
                id_ = call.get("id") if isinstance(call, Mapping) else None
                result.append(
                    waiting.pop(next((at for at, one in enumerate(waiting) if one.get("tool_call_id") == id_), 0))
                )
        result += waiting
    return result
