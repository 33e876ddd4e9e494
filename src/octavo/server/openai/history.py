"""Messages of a conversation as chat templates read them: earlier calls as objects, thoughts under one name."""

import json
from collections.abc import Sequence

import msgspec

from octavo.server.openai.protocol import ChatMessage, ToolCall


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Return the conversation for `ChatTemplate.render`."""
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(message)
    plain.pop("reasoning", None)
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        plain["reasoning_content"] = thoughts
    plain.pop("tool_calls", None)
    calls = [_template_call(call) for call in message.tool_calls or ()]
    return plain | {"tool_calls": calls} if calls else plain  # templates ask whether there is such a field


def _template_call(call: ToolCall) -> dict[str, object]:
    """Templates write arguments with `tojson`, so they want the object; what is none stays the text that it is."""
    plain: dict[str, object] = msgspec.to_builtins(call)
    plain["type"] = "function"
    plain["function"] = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return plain


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
