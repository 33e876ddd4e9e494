"""The prompt of a conversation: one rendering for chats and for `/tokenize`, and the answer that it may have begun.

Templates get messages with text, images as parts, earlier calls as objects, and reasoning under one name.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from octavo.engine.front import EngineFront
from octavo.inputs import TokensPrompt
from octavo.multimodal.placeholders import MultiModalPrompt
from octavo.server.http.errors import bad_request
from octavo.server.openai.params import Warn, truncated
from octavo.server.openai.parsers.wrappers import ReasoningFormat
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, ContentPart, TokenizeRequest, ToolCall
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.server.openai.media import MediaReader

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MEDIA = ("image_url", "video_url")
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_NUM_TAIL_TOKENS = 16  # enough of a prompt to see whether it ends in a message
_NUM_TAIL_CHARACTERS = 8
_MAX_SHOWN = 40  # characters of a name in a warning
_MAX_NAMED = 8  # variables in warnings


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunAnswer:
    """The beginning of an answer, which ends the prompt: the model goes on with it."""

    content: str
    reasoning: str

    @classmethod
    def of(cls, request: ChatCompletionRequest, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> Self | None:
        """Return the last message if the rendered prompt ends in it: by request, or as its template ends no message."""
        last = request.messages[-1]
        if last.role != "assistant":
            return None
        parts = parts_of(last)
        content = "".join(part.text or "" for part in parts) if parts else str(last.content or "")
        begun = cls(content=content, reasoning=last.reasoning_content or last.reasoning or "")
        if request.continue_final_message:
            return begun
        if request.add_generation_prompt is not False:
            return None
        tail = tokenizer.decode(prompt_token_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        end = (begun.content or begun.reasoning).rstrip()[-_NUM_TAIL_CHARACTERS:]
        return begun if end and tail.endswith(end) else None


def render_chat(
    request: ChatCompletionRequest | TokenizeRequest,
    options: Mapping[str, object],
    front: EngineFront,
    reasoning: ReasoningFormat | None,
    media: "MediaReader | None",
    warn: Warn,
) -> TokensPrompt | MultiModalPrompt:
    """Return the prompt of a conversation; `options` are those of `prompt_options`."""
    if request.continue_final_message and request.add_generation_prompt:
        text = "Only one of 'add_generation_prompt' and 'continue_final_message'."
        raise bad_request(text, "continue_final_message")
    options = {
        **options,
        "continue_final_message": bool(request.continue_final_message),
        "add_generation_prompt": request.add_generation_prompt is not False,
    }
    if request.documents is not None:
        options["documents"] = request.documents
    plain = template_messages(request.messages or (), front.tokenizer, warn, media)
    if request.continue_final_message and plain:
        plain[-1] = _with_open_thought(plain[-1], front.tokenizer, reasoning)
    has_to_fit = isinstance(request, ChatCompletionRequest) and request.truncate_prompt_tokens is None
    prompt = front.inputs.chat_prompt(plain, has_to_fit, **options)
    if not isinstance(prompt, MultiModalPrompt):
        return truncated(prompt, request.truncate_prompt_tokens)
    if request.truncate_prompt_tokens is not None:
        text = "Prompts with images cannot be truncated."
        raise bad_request(text, "truncate_prompt_tokens", "unsupported_parameter")
    return prompt


def token_ids_of(prompt: TokensPrompt | MultiModalPrompt) -> list[int]:
    """Return a prompt's tokens, those of images included."""
    return prompt.token_ids if isinstance(prompt, MultiModalPrompt) else prompt["prompt_token_ids"]


def prompt_options(
    request: ChatCompletionRequest | TokenizeRequest, prompt_tools: Sequence[Mapping[str, object]] | None
) -> dict[str, object]:
    """Return the chat template's variables other than the messages. The client's own win. Raises ApiError, 400."""
    options: dict[str, object] = {} if prompt_tools is None else {"tools": prompt_tools}
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
        options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in _OWN_VARIABLES:
            raise bad_request(f"'{name}' is a separate field.", f"chat_template_kwargs.{name}")
        options[name] = value
    return options


def _with_open_thought(
    message: dict[str, object], tokenizer: Tokenizer, reasoning: ReasoningFormat | None
) -> dict[str, object]:
    """Write a thought without an answer into the text if the template does not know it as a field."""
    thought, template = message.get("reasoning_content"), tokenizer.chat_template
    is_known = template is None or template.history.keeps_thoughts
    if not thought or message.get("content") or reasoning is None or is_known:
        return message
    return {**message, "content": f"{reasoning.begin}\n{thought}"}


def template_messages(
    messages: Sequence[ChatMessage],
    tokenizer: Tokenizer,
    warn: Warn,
    media: "MediaReader | None" = None,
) -> list[dict[str, object]]:
    """Return the conversation for the template, media as `media` reads them; None: the model takes text only."""
    plain = [_template_message(message, f"messages[{index}].content", media) for index, message in enumerate(messages)]
    if tokenizer.chat_template is not None and tokenizer.chat_template.must_merge(plain):
        warn("system messages are merged into the first: the model's chat template has no place for later ones")
    return plain


def _template_message(message: ChatMessage, path: str, media: "MediaReader | None") -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(
        msgspec.structs.replace(message, content=None, reasoning=None, tool_calls=None, function_call=None)
    )
    if (content := _content_of(message, path, media)) is not None:
        plain["content"] = content
    if reasoning := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = reasoning
    if message.role == "function":  # the older name of a tool's result
        plain["role"] = "tool"
    older = [ToolCall(function=message.function_call)] if message.function_call is not None else []
    calls = [_template_call(call) for call in message.tool_calls or older]
    return plain | {"tool_calls": calls} if calls else plain  # templates test whether the field exists


def _content_of(message: ChatMessage, path: str, media: "MediaReader | None") -> object:
    """Return the content as text, or with images as a list of parts."""
    if not isinstance(message.content, list):
        return message.content
    places = [(part, f"{path}[{index}]") for index, part in enumerate(message.content)]
    for part, at in places:
        if part.type not in ("text", "refusal") and not (media and is_media(part)):
            accepted = "only text" if media is None else "text, image_url and video_url"
            text = f"This model accepts {accepted}, not '{part.type}'."
            raise bad_request(text, f"{at}.type", "unsupported_content")
    if media is None or not any(map(is_media, message.content)):
        return "".join(_part_text(part, at) for part, at in places)
    return [
        media.read(part, at) if is_media(part) else {"type": "text", "text": _part_text(part, at)}
        for part, at in places
    ]


def _part_text(part: ContentPart, path: str) -> str:
    text = part.refusal if part.text is None else part.text
    if text is None:
        missing = f"{path}.{part.type}"
        raise bad_request(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    return text


def _template_call(call: ToolCall) -> dict[str, object]:
    """Templates apply `tojson` to arguments, so they need the object; text that is not one stays text."""
    given: object = call.function.arguments or {}
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(given)
            given = value if isinstance(value, dict) else given
    return {
        **msgspec.to_builtins(call),
        "type": "function",
        "function": {"name": call.function.name, "arguments": given},
    }


def unread_parts(request: ChatCompletionRequest, template: ChatTemplate, *, has_tools: bool) -> Iterator[str]:
    """Yield a warning for each part that is meant for the chat template and that it does not read."""
    why = "the model's chat template does not read it"

    def is_read(name: str) -> bool:
        return template.reads(name, with_tools=has_tools)

    if has_tools and not is_read("tools"):
        yield "the prompt does not show the tools: the model's chat template has no place for them"
    if request.reasoning_effort is not None and not (is_read("reasoning_effort") or is_read("enable_thinking")):
        yield f"reasoning_effort does not change the prompt: {why}"
    if request.documents is not None and not is_read("documents"):
        yield f"documents have no effect: {why}"
    unread = [name for name in request.chat_template_kwargs or {} if not is_read(name)]
    for name in unread[:_MAX_NAMED]:
        yield f"chat_template_kwargs.{name[:_MAX_SHOWN]!r} does not change the prompt: {why}"
    if len(unread) > _MAX_NAMED:
        yield f"{len(unread) - _MAX_NAMED} more of chat_template_kwargs do not change the prompt"


def has_media(messages: Sequence[ChatMessage] | None) -> bool:
    """Return whether any message has an image or video: preparing it takes a while."""
    return any(is_media(part) for message in messages or () for part in parts_of(message))


def is_media(part: ContentPart) -> bool:
    return part.type in _MEDIA


def parts_of(message: ChatMessage) -> Sequence[ContentPart]:
    """Return the parts of a message; none if its content is text."""
    return message.content if isinstance(message.content, list) else ()
