"""From a Responses request to the chat that it means."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from octavo.server.http.errors import bad_request
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    JsonSchemaFormat,
    ResponseFormat,
)
from octavo.server.openai.translation import Conversation, Translated, Translation
from octavo.server.responses.items import ItemReader, PlacedItem, instructions_text
from octavo.server.responses.protocol import ReasoningConfig, ReplyReasoning, ResponsesRequest, TextFormat
from octavo.server.responses.tools import ToolNames, chat_tool_choice, chat_tools
from octavo.tokenizer.chat_template import ChatTemplate

_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_WITHOUT_EFFECT = ("context_management", "moderation", "max_tool_calls")
_REFUSED = {
    "conversation": "this server keeps no conversations; 'previous_response_id' goes on from a response",
    "prompt": "this server keeps no prompts",
}
_SAME = (  # fields of chats with the same name and meaning
    "model", "stream", "temperature", "top_p", "user", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "ignore_eos", "min_tokens", "priority", "cache_salt", "chat_template_kwargs",
    "thinking_token_budget", "parallel_tool_calls",
)  # fmt: skip
_NAMES = (  # of a chat's fields, where a request calls them otherwise
    (re.compile(r"response_format\.json_schema\.schema"), "text.format.schema"),
    (re.compile(r"response_format(?!\w)"), "text.format"),
    (re.compile(r"(?<![\w.])reasoning_effort"), "reasoning.effort"),
    (re.compile(r"\.function(?=\.(?:parameters|name))"), ""),
    (re.compile(r"(?<!\w)max_(?:completion_)?tokens"), "max_output_tokens"),
    (re.compile(r"^messages(?=$|[=:])"), "input"),
)


class ResponsesChat(ChatCompletionRequest, kw_only=True):
    """A chat whose reply is a response."""

    asked: ResponsesRequest
    names: ToolNames
    shows_summaries: bool = False  # thoughts come as summaries, which clients show
    covers_thoughts: bool = False  # thoughts come once more as what a client sends back unread
    is_kept: bool = False

    def echoed(self) -> dict[str, Any]:
        """Return the fields of the response that repeat the request."""
        asked = self.asked
        reasoning = asked.reasoning or ReasoningConfig()
        wanted = (asked.text.format if asked.text is not None else None) or TextFormat(type="text")
        text: dict[str, Any] = {
            "format": {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}
        }
        if asked.text is not None and asked.text.verbosity is not None:
            text["verbosity"] = asked.text.verbosity
        return {
            "instructions": asked.instructions,
            "previous_response_id": asked.previous_response_id,
            "background": bool(asked.background),
            "store": self.is_kept,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "top_logprobs": asked.top_logprobs or 0,
            "presence_penalty": asked.presence_penalty or 0.0,
            "frequency_penalty": asked.frequency_penalty or 0.0,
            "reasoning": ReplyReasoning(effort=reasoning.effort, summary=_summary(reasoning)),
            "text": text,
            "tools": [_echoed_tool(tool) for tool in asked.tools or ()],
            "tool_choice": "auto" if asked.tool_choice is None else _without_none(asked.tool_choice),
            "user": asked.user,
            "safety_identifier": asked.safety_identifier,
            "prompt_cache_key": asked.prompt_cache_key,
        }


def translated(
    request: ResponsesRequest,
    earlier: Sequence[Mapping[str, Any]],
    warn: Warn,
    *,
    template: ChatTemplate | None,
    takes_images: bool,
) -> Translation[ResponsesChat]:
    """Return the chat of a request that goes on from earlier items.

    Raises ApiError, 400: names the part that has no meaning here.
    """
    for name, why in _REFUSED.items():
        if getattr(request, name) is not None:
            raise bad_request(f"{name}: {why}", name, "unsupported_parameter")
    for name in _WITHOUT_EFFECT:
        if getattr(request, name):
            warn(f"{name} is not supported and has no effect")
    if request.truncation not in (None, "disabled"):
        warn("truncation has no effect: an input beyond the context is refused")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        warn("text.verbosity has no effect")
    conversation = Conversation.of(template)
    items = [*(("previous_response_id", item) for item in earlier), *input_items(request)]
    names = chat_tools([*(request.tools or ()), *_additional(items)], conversation.places, warn)
    reader = ItemReader(conversation, names, warn, takes_images=takes_images)
    reader.instruct(instructions_text(request.instructions))
    reader.read(items)
    conversation.warn_of_moves(warn)
    _complete(conversation, items)
    reasoning, include = request.reasoning or ReasoningConfig(), request.include or ()
    for name in include:
        if name not in (_ENCRYPTED, _LOGPROBS):
            warn(f"include={name[:60]!r} has no effect")
    chat = ResponsesChat(
        **{name: getattr(request, name) for name in _SAME},
        messages=conversation.messages,
        max_tokens=request.max_output_tokens,
        tools=names.definitions or None,
        tool_choice=chat_tool_choice(request, names, warn),
        response_format=_response_format(request),
        reasoning_effort=reasoning.effort,
        logprobs=True if _LOGPROBS in include or request.top_logprobs else None,
        top_logprobs=request.top_logprobs,
        asked=request,
        names=names,
        shows_summaries=_summary(reasoning) is not None,
        covers_thoughts=_ENCRYPTED in include,
    )
    if chat.tools is None and chat.tool_choice == "auto":
        chat.tool_choice = None  # all tools were left out
    return Translation(chat=chat, places=conversation.places, names=_NAMES)


def input_items(request: ResponsesRequest) -> Iterator[PlacedItem]:
    """Yield the items of a request with their paths; a text is what a user says."""
    if isinstance(request.input, str):
        if request.input:
            yield "input", {"type": "message", "role": "user", "content": request.input}
        return
    for index, item in enumerate(request.input or ()):
        yield f"input[{index}]", item


def _additional(items: Sequence[PlacedItem]) -> Iterator[Mapping[str, Any]]:
    """Yield the tools that items bring with them."""
    for path, item in items:
        if item.get("type") == "additional_tools":
            tools = item.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise bad_request(f"{path}.tools: a list of tools", f"{path}.tools", "invalid_type")
            yield from tools


def _complete(conversation: Conversation, items: Sequence[PlacedItem]) -> None:
    """Let a conversation end in something to answer: a probe says nothing. Raises ApiError, 400: a call is open."""
    messages = conversation.messages
    if not messages or messages[-1].role in ("system", "developer"):
        conversation.add(Translated(ChatMessage(role="user", content="")), "input")
    elif messages[-1].tool_calls:
        path = items[-1][0]
        call = messages[-1].tool_calls[-1].id
        raise bad_request(f"No tool output found for function call {call}.", path, "missing_tool_output")


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else ResponseFormat(type=wanted.type)
    schema = JsonSchemaFormat(
        schema=wanted.schema, name=wanted.name, description=wanted.description, strict=wanted.strict
    )
    return ResponseFormat(type="json_schema", json_schema=schema)


def _summary(reasoning: ReasoningConfig) -> str | None:
    wanted = reasoning.summary or reasoning.generate_summary
    return None if wanted == "none" else wanted


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that clients look for."""
    blank = {"description": None, "parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**blank, **tool}


def _without_none(choice: object) -> Any:
    plain = msgspec.to_builtins(choice)
    return {name: value for name, value in plain.items() if value is not None} if isinstance(plain, dict) else plain
