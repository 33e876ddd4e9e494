"""Converts messages for chat templates: text, images as parts, earlier calls as objects, reasoning under one name."""

import json
from collections.abc import Callable, Sequence

import msgspec

from octavo.server.errors import bad_request
from octavo.server.openai.content_parts import MediaReader, is_media
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, ContentPart, TokenizeRequest, ToolCall
from octavo.tokenizer.tokenizer import Tokenizer


def prompt_end(request: ChatCompletionRequest | TokenizeRequest) -> dict[str, object]:
    """Return how the chat template is to end the prompt.

    Raises:
        ApiError: 400; both options at once.
    """
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request("Only one of 'add_generation_prompt' and 'continue_final_message'.", "continue_final_message")
    return {
        "continue_final_message": bool(request.continue_final_message),
        "add_generation_prompt": request.add_generation_prompt is not False,
    }


def template_messages(
    messages: Sequence[ChatMessage],
    tokenizer: Tokenizer,
    warn: Callable[[str], None],
    media: MediaReader | None = None,
) -> list[dict[str, object]]:
    """Return the conversation for `ChatTemplate.render`; warn if the template will merge system messages.

    `media` reads images and videos; None: the model takes text only.

    Raises:
        ApiError: 400; a message part that the model does not take.
    """
    if media is not None:
        media.check_number(messages)
    plain = [_template_message(message, f"messages[{index}].content", media) for index, message in enumerate(messages)]
    if tokenizer.chat_template is not None and tokenizer.chat_template.must_merge(plain):
        warn("system messages are merged into the first: the model's chat template has no place for later ones")
    return plain


def _template_message(message: ChatMessage, path: str, media: MediaReader | None) -> dict[str, object]:
    content = _content_of(message, path, media)
    plain: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(message, content=None))
    if content is not None:
        plain["content"] = content
    plain.pop("reasoning", None)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    for name in ("tool_calls", "function_call"):
        plain.pop(name, None)
    if message.role == "function":  # the older name of a tool's result
        plain["role"] = "tool"
    older = [ToolCall(function=message.function_call)] if message.function_call is not None else []
    calls = [_template_call(call) for call in message.tool_calls or older]
    return plain | {"tool_calls": calls} if calls else plain  # templates test whether the field exists


def _content_of(message: ChatMessage, path: str, media: MediaReader | None) -> object:
    """Return the content as text, or with images as a list of parts."""
    if not isinstance(message.content, list):
        return message.content
    places = [(part, f"{path}[{index}]") for index, part in enumerate(message.content)]
    for part, at in places:
        _check_kind(part, at, media)
    if media is None or not any(map(is_media, message.content)):
        return "".join(_part_text(part, at) for part, at in places)
    return [
        media.read(part, at) if is_media(part) else {"type": "text", "text": _part_text(part, at)}
        for part, at in places
    ]


def _check_kind(part: ContentPart, path: str, media: MediaReader | None) -> None:
    if part.type not in ("text", "refusal") and not (media and is_media(part)):
        accepted = "only text" if media is None else "text, image_url and video_url"
        text = f"This model accepts {accepted}, not '{part.type}'."
        raise bad_request(text, f"{path}.type", "unsupported_content")


def _part_text(part: ContentPart, path: str) -> str:
    text = part.refusal if part.text is None else part.text
    if text is None:
        missing = f"{path}.{part.type}"
        raise bad_request(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    return text


def _template_call(call: ToolCall) -> dict[str, object]:
    """Templates apply `tojson` to arguments, so they need the object; text that is not one stays text."""
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
