"""Anthropic's Messages API on the wire: requests, replies and their parts.

As in OpenAI's API, `null` means "not given", and unknown fields have no effect but a warning. `cache_control` is known
everywhere and has none: the server finds prefixes by itself.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Source(msgspec.Struct, kw_only=True):
    """Where an image or document is: in `data`, as base64 or text, at a `url`, or in blocks."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: "str | list[Block] | None" = None


class Block(msgspec.Struct, kw_only=True):
    """One part of a message, of a result, or of the system prompt; `type` says which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


class MessageParam(msgspec.Struct, kw_only=True):
    """One turn: `user`, `assistant`, or `system` in the middle of a conversation."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True):
    """A tool. One with another `type` than `custom` is a provider's own, whose schema only its models know."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """`auto`, `any`, `none`, or `tool` with a name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """`enabled`, `disabled` or `adaptive`; with the display `omitted`, thoughts come without their text."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A form of the answer: type `json_schema`, with a schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """How the answer should be: its form, and the effort behind it."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """About the request."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None  # what a provider removes from long conversations
    mcp_servers: list[Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    container: Any = None
    speed: str | None = None
    diagnostics: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens by purpose."""

    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. The three kinds of input together are the prompt."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0  # the server's cache keeps every prompt, at no price
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the output."""
        num_cached = self.cache_creation_input_tokens + self.cache_read_input_tokens
        return self.input_tokens + num_cached, self.output_tokens


class ReplyBlock(msgspec.Struct, kw_only=True):
    """One part of an answer: `text`, `thinking` or `tool_use`."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/messages`."""

    id: str
    model: str
    content: list[ReplyBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
