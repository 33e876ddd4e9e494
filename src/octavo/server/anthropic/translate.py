"""From a request of the Messages API to the chat that it means."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.anthropic.blocks import Turn, chat_messages, system_text
from octavo.server.anthropic.protocol import CountTokensRequest, MessagesRequest, Thinking, Tool
from octavo.server.http.errors import bad_request
from octavo.server.openai.answer_plan import AnswerFormats
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    ResponseFormat,
    ToolChoiceObject,
    ToolDefinition,
)
from octavo.server.openai.translation import Conversation, Translated, Translation, missing

_MODES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_WITHOUT_EFFECT = ("mcp_servers", "container", "context_management")
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the variable that turns reasoning on and off
_DISPLAYS = (None, "summarized", "omitted")
_NAMES = (  # of a chat's fields, where a request calls them otherwise
    (re.compile(r"response_format\.json_schema\.schema"), "output_config.format.schema"),
    (re.compile("thinking_token_budget"), "thinking.budget_tokens"),
    (re.compile("reasoning_effort"), "output_config.effort"),
    (re.compile(r"\.function\.parameters"), ".input_schema"),
    (re.compile(r"\.function\.name"), ".name"),
    (re.compile(r"^stop(?=[\[=]|$)"), "stop_sequences"),
)


class MessagesChat(ChatCompletionRequest, kw_only=True):
    """A chat whose reply is a message."""

    shows_thoughts: bool = True  # else they come without their text


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """What the model and the server's options make of requests."""

    formats: AnswerFormats
    takes_images: bool
    keeps_billing_header: bool

    def reads(self, variable: str) -> bool:
        """Whether the chat template looks at a variable."""
        template = self.formats.tokenizer.chat_template
        return template is not None and (template.reads(variable) or template.reads(variable, with_tools=True))


def translated(request: CountTokensRequest, reader: Reader, warn: Warn) -> Translation[MessagesChat]:
    """Return the chat of a request. Raises ApiError, 400: names the part that has no meaning here."""
    turns = list(_turns(request))
    conversation = Conversation.of(reader.formats.tokenizer.chat_template)
    if system := system_text(request.system, keeps_billing_header=reader.keeps_billing_header):
        conversation.add(Translated(ChatMessage(role="system", content=system)), "system")
    for turn in turns:
        for message in chat_messages(turn, warn, takes_images=reader.takes_images):
            conversation.add(message, turn.path)
    conversation.warn_of_moves(warn)
    messages, places = conversation.messages, conversation.places
    _check_end(messages, turns)
    chat = MessagesChat(
        messages=messages,
        model=request.model,
        continue_final_message=True if messages[-1].role == "assistant" else None,
        tools=_tools(request.tools or (), places, warn) or None,
        tool_choice=_tool_choice(request),
        parallel_tool_calls=False if request.tool_choice and request.tool_choice.disable_parallel_tool_use else None,
        response_format=_response_format(request),
    )
    _think(chat, request, reader, warn)
    for name in _WITHOUT_EFFECT:
        if getattr(request, name, None):
            warn(f"{name} is not supported and has no effect")
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stream, chat.stop = request.max_tokens, request.stream, request.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.user = request.metadata.user_id if request.metadata else None
    return Translation(chat=chat, places=places, names=_NAMES)


def _turns(request: CountTokensRequest) -> Iterator[Turn]:
    """Yield the turns of a conversation: successive messages of one role are one."""
    if not request.messages:
        raise bad_request("messages: at least one message is required", "messages")
    turn: Turn | None = None
    for index, message in enumerate(request.messages):
        path = f"messages[{index}]"
        if message.role not in ("user", "assistant", "system"):
            raise bad_request(f"{path}.role={message.role[:40]!r}: one of user, assistant, system", f"{path}.role")
        if turn is None or turn.role != message.role:
            if turn is not None:
                yield turn
            turn = Turn(message.role, path)
        turn.add(message.content, f"{path}.content")
    assert turn is not None
    if turn.role != "assistant" or not turn.is_blank:  # a last answer without a word asks for all of it
        yield turn


def _check_end(messages: Sequence[ChatMessage], turns: Sequence[Turn]) -> None:
    if not messages or not turns:
        raise bad_request("messages: at least one message with content is required", "messages")
    if messages[-1].tool_calls:
        text = f"{turns[-1].path}: the conversation ends in a tool_use; its tool_result is missing"
        raise bad_request(text, turns[-1].path)


def _tools(tools: Sequence[Tool], places: dict[str, str], warn: Warn) -> list[ToolDefinition]:
    found: list[ToolDefinition] = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            text = f"tools[{index}] is left out: {tool.type[:60]!r} is a tool of another provider"
            warn(text)
            continue
        if tool.name is None:
            raise missing(f"tools[{index}].name")
        places[f"tools[{len(found)}]"] = f"tools[{index}]"
        function = FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        found.append(ToolDefinition(type="function", function=function))
    return found


def _tool_choice(request: CountTokensRequest) -> str | ToolChoiceObject | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise missing("tool_choice.name")
        return ToolChoiceObject(function=NamedFunction(name=choice.name))
    if choice.type not in _MODES:
        text = f"tool_choice.type={choice.type[:40]!r}: one of auto, any, tool, none"
        raise bad_request(text, "tool_choice.type")
    return _MODES[choice.type]


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    config = request.output_config
    wanted = config.format if config is not None and config.format is not None else request.output_format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        text = f"output_config.format.type={wanted.type[:40]!r}: json_schema is expected"
        raise bad_request(text, "output_config.format.type")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=wanted.schema))


def _think(chat: MessagesChat, request: CountTokensRequest, reader: Reader, warn: Warn) -> None:
    """Turn reasoning on or off: without being asked, a model does not think, or not aloud."""
    thinking = request.thinking or Thinking(type="disabled")
    if thinking.type not in _THINKING:
        text = f"thinking.type={thinking.type[:40]!r}: one of {', '.join(_THINKING)}"
        raise bad_request(text, "thinking.type")
    if thinking.display not in _DISPLAYS:
        text = f"thinking.display={thinking.display[:40] if thinking.display else None!r}: summarized or omitted"
        raise bad_request(text, "thinking.display")
    is_on = _THINKING[thinking.type]
    switches: dict[str, Any] = {name: is_on for name in _SWITCHES if reader.reads(name)}
    chat.chat_template_kwargs = switches or None
    chat.include_reasoning, chat.shows_thoughts = is_on, thinking.display != "omitted"
    effort = request.output_config.effort if request.output_config else None
    if effort is not None and reader.reads("reasoning_effort"):
        chat.reasoning_effort = effort
    elif effort is not None:
        warn("output_config.effort has no effect: the model's chat template does not read it")
    if is_on and reader.formats.reasoning is None:
        warn("thinking has no effect: no reasoning format is known for this model")
    elif is_on and thinking.budget_tokens is not None and isinstance(request, MessagesRequest):
        if not reader.formats.counts_reasoning:
            warn("thinking.budget_tokens has no effect: the tags of this model's thoughts are not single tokens")
        elif thinking.budget_tokens < request.max_tokens:  # else the answer ends before it
            chat.thinking_token_budget = thinking.budget_tokens
