"""OpenAI's Responses API on the wire: requests, input items, responses and their output.

Input items and tools stay as they are given, of any kind, until `items.py` and `tools.py` read those that they know.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.openai.token_usage import ResponseUsage


class Part(msgspec.Struct, kw_only=True):
    """One part of a message, of a thought or of a tool's output; `type` says which fields it has."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None


class MessageItem(msgspec.Struct, kw_only=True):
    """What somebody says: `user`, `assistant`, `system` or `developer`."""

    role: str
    content: str | list[Part] | None = None


class ReasoningItem(msgspec.Struct, kw_only=True):
    """A thought of an earlier answer."""

    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None


class CallItem(msgspec.Struct, kw_only=True):
    """A call of a function, with `arguments`, or of a custom tool, with `input`."""

    name: str
    call_id: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None


class OutputItem(msgspec.Struct, kw_only=True):
    """What a call has returned: text, parts, or any JSON."""

    call_id: str
    output: Any = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool of any type; a `namespace` has tools of its own."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class ToolFormat(msgspec.Struct, kw_only=True):
    """The form of a custom tool's input: `text`, or `grammar`."""

    type: str = "text"
    syntax: str = ""
    definition: str | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """One tool by type and name, or `allowed_tools` with a mode."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: "list[ResponsesToolChoice] | None" = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The form of the text: `text`, `json_object`, or `json_schema` with a schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """How the text of the answer should be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model should think, and whether its thoughts come as summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Options of streams, all without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    client_metadata: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    # As in chats, beyond OpenAI's fields.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


class ReplyPart(msgspec.Struct, kw_only=True):
    """A piece of an output item: `output_text`, `reasoning_text` or `summary_text`."""

    type: str
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ReplyItem(msgspec.Struct, kw_only=True):
    """One item of the output: `message`, `reasoning`, `function_call` or `custom_tool_call`."""

    type: str
    id: str
    status: str
    role: str | UnsetType = UNSET
    content: list[ReplyPart] | UnsetType = UNSET
    summary: list[ReplyPart] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response is incomplete."""

    reason: str


class ReplyReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response. `status` is `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[ReplyItem]
    object: str = "response"
    usage: ResponseUsage | None = None  # until it is over
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    instructions: str | list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    background: bool = False
    store: bool = False
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    reasoning: ReplyReasoning = ReplyReasoning()
    text: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    truncation: str = "disabled"
    service_tier: str = "default"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/responses/{id}/input_items`."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True
